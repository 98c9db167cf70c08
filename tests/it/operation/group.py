"""Sends signals to the own process group from inside and prints which processes they reached.

The processes outside ("none": without Landlock) are this one and a bystander in the same group.
"""

import ctypes
import os
import signal
import struct
import subprocess
import sys

libc = ctypes.CDLL(None, use_errno=True)
KILL, SETPRIORITY, IOPRIO_SET = (62, 141, 251) if os.uname().machine == "x86_64" else (129, 140, 30)
LANDLOCK_CREATE_RULESET, ENOSYS, EPERM = 444, 38, 1
SECCOMP_RET_ERRNO, SECCOMP_RET_ALLOW = 0x00050000, 0x7FFF0000


def without_landlock():
    """Makes the kernel answer as one without Landlock."""
    code = [
        (0x20, 0, 0, 0),
        (0x15, 0, 1, LANDLOCK_CREATE_RULESET),
        (0x06, 0, 0, SECCOMP_RET_ERRNO | ENOSYS),
        (0x06, 0, 0, SECCOMP_RET_ALLOW),
    ]
    filters = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
    program = struct.pack("HxxxxxxP", len(code), ctypes.addressof(filters))
    assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0


def call(name, number, *args):
    done = libc.syscall(number, *args)
    print(f"{name}:", "OPEN" if done != -1 else ctypes.get_errno(), flush=True)


def report(*_):
    print("term", flush=True)


def inside():
    signal.signal(signal.SIGTERM, report)
    child = subprocess.Popen([sys.executable, __file__, "child"], stdout=subprocess.PIPE, text=True)
    child.stdout.readline()
    if libc.syscall(KILL, 0, signal.SIGTERM) == -1:
        print("kill:", ctypes.get_errno(), flush=True)
        child.kill()
    else:
        # The child prints when it is reached and ends.
        print(child.stdout.readline(), end="", flush=True)
    child.wait()
    call("priority", SETPRIORITY, 1, 0, 5)
    call("ioprio", IOPRIO_SET, 2, 0, 3 << 13)
    # A group of the command's own gets signals by its number.
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
        os.write(writer, b"x")
        while True:
            signal.pause()
    os.read(reader, 1)
    members = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if os.getpgid(pid) == pid]
    [group] = [pid for pid in members if pid not in (1, os.getpid())]
    os.killpg(group, signal.SIGTERM)
    _, status = os.waitpid(group, 0)
    print("own group:", "term" if os.waitstatus_to_exitcode(status) == 7 else status, flush=True)


def outside():
    # The version that confines signals.
    if sys.argv[1] == "none" or libc.syscall(LANDLOCK_CREATE_RULESET, None, 0, 1) < 6:
        print("without Landlock", flush=True)
        without_landlock()
    bystander = subprocess.Popen(["sleep", "60"])
    reached = []
    signal.signal(signal.SIGTERM, lambda *_: reached.append("term"))
    command = ["./exeat", "run", "-q", "-c", "run.toml", "--task", "t", "--isolate", "--"]
    ran = subprocess.run([*command, sys.executable, __file__, "inside"])
    changed = [os.getpriority(os.PRIO_PROCESS, pid) for pid in (0, bystander.pid)] != [0, 0]
    dead = bystander.poll() is not None
    print("outside:", "REACHED" if reached or dead or changed or ran.returncode else "alive")
    bystander.kill()


if sys.argv[1] == "inside":
    inside()
elif sys.argv[1] == "child":
    signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b"term\n"), os._exit(0)))
    os.write(1, b"ready\n")
    while True:
        signal.pause()
else:
    outside()
