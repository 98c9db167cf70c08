"""Tries to see what a mount covers: renames the mount point, or its parent, into a directory that is mounted twice."""

import ctypes
import os
import platform
import socket
import sys

parent, name = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)
NEWNS, NEWUSER, BIND, DETACH = 0x20000, 0x10000000, 0x1000, 2
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}[platform.machine()]


def call(function, *args):
    if function(*args) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def mount(source, target):
    call(libc.mount, source.encode(), target.encode(), b"", BIND, None)


def show(how, path):
    print(how, sorted(os.listdir(path)))
    for entry in os.listdir(path):
        try:
            socket.socket(socket.AF_UNIX).connect(f"{path}/{entry}")
            print("connected to", entry)
        except OSError as error:
            print(error.strerror)


user, group = os.getuid(), os.getgid()
os.makedirs(f"{parent}/once/old", exist_ok=True)
os.makedirs(f"{parent}/twice", exist_ok=True)
try:
    call(libc.unshare, NEWNS | (NEWUSER if user else 0))
    if user:
        for file, text in [("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")]:
            with open(f"/proc/self/{file}", "w") as out:
                out.write(text)
    mount(f"{parent}/once", f"{parent}/twice")
    # The parent of the mount point.
    os.rename(f"{parent}/holder", f"{parent}/once/holder")
    show("by its parent", f"{parent}/twice/holder/{name}")
    os.rename(f"{parent}/once/holder", f"{parent}/holder")
    # The mount point itself, after the mounts of this namespace have been detached.
    holder = os.open(f"{parent}/holder", os.O_RDONLY)
    once = os.open(f"{parent}/once", os.O_RDONLY)
    os.chdir(f"{parent}/twice")
    call(libc.syscall, PIVOT_ROOT, b".", b"old")
    os.chdir("/")
    call(libc.umount2, b"/old", DETACH)
    os.rename(name, "x", src_dir_fd=holder, dst_dir_fd=once)
    show("by itself", "/x")
    os.rename("x", name, src_dir_fd=once, dst_dir_fd=holder)
except OSError as error:
    print("failed:", error)
