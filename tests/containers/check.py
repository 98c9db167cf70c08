#!/usr/bin/env python3
"""The image and the examples in a container engine: `tests/containers/check.py BINARY`.

The engine is Docker if one answers, or else Podman. No image is pulled: that of exeat is made by the last stage of the
Dockerfile from the static binary, and the one with the clients from programs of this machine. Without an engine, the checks are
named and counted as skipped.
"""

import http.server
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VALUE = "ghp_0fThe0peratorThatN0SandboxSees01"
TOKENS = {"RESEARCH_TOKEN": "a-token-of-the-research-task-0001", "AGENT_TOKEN": "a-token-of-the-agent-task-0000001"}
# Settings of containers that some machines cannot give: limits above their own, and a cgroup hierarchy of its own.
PODMAN = """
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
[network]
network_backend = "netavark"
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1000:1000"]
log_driver = "k8s-file"
"""
CHECKS = []
SH = shutil.which("sh")
# The names of everything that is made here begin with it, so that nothing of others is touched.
OWN = f"exeat-check-{os.getpid()}"


def check(function):
    CHECKS.append(function)
    return function


# The internet of the checks with Podman: addresses of a network namespace of their own, which has no way out of the machine.
WEB, RESOLVER = "192.0.2.1", "192.0.2.53"


class Failed(Exception):
    pass


def holds(condition, *said):
    if not condition:
        raise Failed(" ".join(str(part) for part in said))


def docker_answers():
    return bool(shutil.which("docker")) and subprocess.run(["docker", "info"], capture_output=True, timeout=60).returncode == 0


def podman_can_be_used():
    return os.geteuid() == 0 and all(shutil.which(program) for program in ["podman", "runc", "unshare", "ip"])


class Engine:
    def __init__(self, work):
        self.work = work
        self.env = {**os.environ, **TOKENS, "GITHUB_TOKEN": VALUE}
        self.name = self.compose_command = None
        if docker_answers():
            self.name, self.command = "docker", ["docker"]
            if self._answers(["docker", "compose", "version"]):
                self.compose_command = ["docker", "compose"]
        elif podman_can_be_used():
            config = work / "containers.conf"
            config.write_text(PODMAN)
            self.env["CONTAINERS_CONF"] = str(config)
            self.name = "podman"
            self.command = ["podman", "--root", str(work / "root"), "--runroot", str(work / "run")]
            if compose := shutil.which("podman-compose"):
                # It runs `podman`, which needs the same places.
                wrapper = work / "podman"
                wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("podman")} {" ".join(self.command[1:])} "$@"\n')
                wrapper.chmod(0o755)
                self.compose_command = [compose, "--podman-path", str(wrapper)]

    def _answers(self, command):
        return subprocess.run(command, capture_output=True, env=self.env, timeout=60).returncode == 0

    def works(self):
        """Whether a container can be run. That of exeat is not asked: if it cannot, that is a failure."""
        ran = self.run("run", "--rm", "--network", "none", "--entrypoint", SH, f"{OWN}-tools", "-c", "echo works", may_fail=True)
        if ran.strip() != "works":
            print(f"{self.name} cannot run a container here: {ran.strip()[-400:]}")
        return ran.strip() == "works"

    def _finish(self, command, may_fail, **options):
        done = subprocess.run(command, capture_output=True, text=True, env=self.env, timeout=120, **options)
        if done.returncode and not may_fail:
            raise Failed(f"{' '.join(map(str, command))}: {done.stdout}{done.stderr}")
        return done.stdout + (done.stderr if may_fail else "")

    def run(self, *args, may_fail=False):
        return self._finish([*self.command, *args], may_fail)

    def compose(self, folder, *args, may_fail=False):
        files = ["compose.yaml", *(["compose.podman.yaml"] if self.name == "podman" else []), "compose.override.yaml"]
        files = ["-p", OWN, *(part for file in files for part in ["-f", file])]
        return self._finish([*self.compose_command, *files, *args], may_fail, cwd=folder)

    def inspect(self, container):
        return json.loads(self.run("inspect", container))[0]

    def build(self, tag, context, dockerfile):
        (context / "Dockerfile").write_text(dockerfile)
        # Podman's own format has no health check. No base image is needed, and none is looked for.
        form = ["--format", "docker"] if self.name == "podman" else []
        self.run("build", *form, "--network", "none", "--pull=false", "-t", tag, str(context))

    def address(self, container, network):
        networks = self.inspect(container)["NetworkSettings"]["Networks"]
        name = next(name for name in networks if name == network or name.endswith(f"_{network}"))
        return networks[name]["IPAddress"]


def copy_programs(folder, programs):
    """Copies programs of this machine with the libraries that they need."""
    wanted = [shutil.which(program) or program for program in programs]
    while wanted:
        file = wanted.pop()
        to = folder / file.lstrip("/")
        if to.exists():
            continue
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, to)
        listed = subprocess.run(["ldd", file], capture_output=True, text=True).stdout
        wanted += re.findall(r"(/\S+) \(0x", listed)


def build_images(engine, binary, work):
    context = work / "exeat"
    context.mkdir()
    subprocess.run(["sh", str(ROOT / "packaging/tree.sh"), binary, str(context / "tree")], check=True)
    stage = (ROOT / "Dockerfile").read_text().split("FROM scratch", 1)[1].replace("--from=build ", "").replace("/tree/", "tree/")
    engine.build(f"{OWN}-exeat", context, f"FROM scratch{stage}")

    context = work / "tools"
    stdlib = Path(sysconfig.get_path("stdlib"))
    python = os.path.realpath(sys.executable)
    extensions = [str(file) for file in (stdlib / "lib-dynload").glob("*.so") if "test" not in file.name]
    copy_programs(context / "tree", ["curl", "redis-server", "redis-cli", "sh", "cat", "sleep", python, *extensions])
    # The names of hosts come from /etc/hosts.
    for library in ["libnss_files.so.2", "libnss_dns.so.2"]:
        for found in Path("/lib").glob(f"*/{library}"):
            copy_programs(context / "tree", [str(found)])
    unused = shutil.ignore_patterns("test", "tests", "idlelib", "dist-packages", "site-packages", "__pycache__", "*.a", "config-*")
    shutil.copytree(stdlib, context / "tree" / str(stdlib).lstrip("/"), ignore=unused, dirs_exist_ok=True)
    (context / "tree/tmp").mkdir(mode=0o1777)
    shutil.copy(ROOT / "tests/containers/origin.py", context / "tree/origin.py")
    links = "\n".join(f"ENV {line}" for line in [f"PATH=/usr/bin:/bin:{Path(python).parent}", f"PYTHON={python}"])
    engine.build(f"{OWN}-tools", context, f'FROM scratch\nCOPY tree/ /\n{links}\nENTRYPOINT ["/usr/bin/curl"]\n')
    return python


class Place:
    """What all checks use: an engine with images, a network each inside and outside, and an origin."""

    def __init__(self, engine, work, python):
        self.engine, self.work, self.python = engine, work, python
        self.certificates = work / "certificates"
        self.certificates.mkdir()
        key, cert = self.certificates / "key.pem", self.certificates / "cert.pem"
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
             "-subj", "/CN=api.github.com", "-addext", "subjectAltName=DNS:api.github.com", "-addext", "basicConstraints=critical,CA:FALSE", "-keyout", key, "-out", cert],
            check=True, capture_output=True)
        key.chmod(0o644)
        no_dns = ["--disable-dns"] if engine.name == "podman" else []
        engine.run("network", "create", "--internal", *no_dns, f"{OWN}-inside")
        engine.run("network", "create", f"{OWN}-outside")
        self.start(f"{OWN}-origin", ["-v", f"{self.certificates}:/certificates:ro"], f"{OWN}-tools", ["/origin.py"], f"{OWN}-outside", python)
        self.origin = engine.address(f"{OWN}-origin", f"{OWN}-outside")
        # 443 is for root, or for a container whose namespace allows it.
        self.wait("the origin", lambda: "listens" in engine.run("logs", f"{OWN}-origin", may_fail=True))

    def start(self, name, options, image, command, network, entrypoint=None):
        entry = ["--entrypoint", entrypoint] if entrypoint else []
        self.engine.run("run", "-d", "--name", name, "--network", network, *entry, *options, image, *command)

    def wait(self, what, holds, seconds=40):
        """Asks until it holds."""
        until = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > until:
                raise Failed(f"{what} takes too long")
            time.sleep(0.1)

    def widened(self, text):
        """The configuration with the origin in the place of the internet."""
        more = (f'[dns]\nhosts = {{ "api.github.com" = ["{self.origin}"] }}\n'
                f'[upstream]\nextra_roots = ["/certificates/cert.pem"]\n[network]\nallow_cidrs = ["{self.origin}/32"]\n')
        return f"{text}\n{more}"

    def is_healthy(self, container):
        state = self.engine.inspect(container)["State"]
        health = state.get("Health") or state.get("Healthcheck") or {}
        if health.get("Status") == "healthy":
            return True
        # Podman without systemd has nobody who runs the check of the image.
        return self.engine.name == "podman" and self.engine.run("healthcheck", "run", container, may_fail=True).strip() == ""

    def process(self, container):
        """The status of the first process of a container, as the kernel says it."""
        pid = self.engine.inspect(container)["State"]["Pid"]
        holds(pid > 0, container, "does not run")
        status = Path(f"/proc/{pid}/status").read_text()
        return dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)

    def sandboxed(self, options, script, network=f"{OWN}-inside"):
        """Runs a script in a sandbox."""
        return self.engine.run(
            "run", "--rm", "--network", network, "--dns", "127.0.0.1", "--cap-drop", "ALL", "--entrypoint", SH, *options,
            f"{OWN}-tools", "-c", script, may_fail=True)


def is_confined(place, container):
    """Asserts that a container is read-only, of a user who is not root, and without capabilities."""
    status = place.process(container)
    for kind in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"]:
        holds(int(status[kind], 16) == 0, container, kind, status[kind])
    holds(status["NoNewPrivs"] == "1", "NoNewPrivs", status["NoNewPrivs"])
    # exeat's own filter is installed even where the engine has none.
    holds(status["Seccomp"] == "2", "Seccomp", status["Seccomp"])
    holds(set(status["Uid"].split()) == {"65532"} and set(status["Gid"].split()) == {"65532"}, status["Uid"], status["Gid"])
    holds(place.engine.inspect(container)["HostConfig"]["ReadonlyRootfs"], "the root is writable")
    pid = place.engine.inspect(container)["State"]["Pid"]
    mounts = Path(f"/proc/{pid}/mounts").read_text().splitlines()
    root = next(line.split()[3] for line in mounts if line.split()[1] == "/")
    holds("ro" in root.split(","), "the root is mounted", root)


# What a sandbox may try besides the proxy: addresses, names, and all resolvers that there may be.
WAYS_OUT = """
PATH=/usr/bin:/bin
curl -sk -m 5 -o /dev/null --noproxy '*' https://{origin}/ && echo reached the origin
curl -sk -m 5 -o /dev/null --noproxy '*' https://api.github.com/ && echo reached the name
curl -sk -m 5 -o /dev/null --noproxy '*' --resolve api.github.com:443:{origin} https://api.github.com/ && echo reached by resolve
curl -s -m 5 -o /dev/null --noproxy '*' http://{web}/ && echo reached another address
"$PYTHON" -c '
import socket
query = bytes.fromhex("abcd01000001000000000000") + b"\\3api\\6github\\3com\\0" + bytes.fromhex("00010001")
own = socket.gethostbyname(socket.gethostname())
gateway = own.rsplit(".", 1)[0] + ".1"
for server in [gateway, "127.0.0.11", "{resolver}", "{origin}"]:
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.settimeout(2)
    try:
        s.sendto(query, (server, 53))
        # The count of answers.
        if s.recv(512)[6:8] != bytes(2):
            print("reached the resolver", server)
    except OSError:
        pass
'
echo tried
"""


def ways_out(place, run):
    """Returns what a sandbox reaches besides the proxy."""
    said = run(WAYS_OUT.replace("{origin}", place.origin).replace("{web}", WEB).replace("{resolver}", RESOLVER))
    holds("tried" in said, "the sandbox says", said)
    return re.findall("reached.*", said)


def assert_no_way_out(place, run):
    ways = ways_out(place, run)
    holds(not ways, "the sandbox", ways)


@check
def a_network_that_is_not_internal_has_these_ways_out(place):
    """The same attempts succeed elsewhere, so that they show something."""
    ways = ways_out(place, lambda script: place.sandboxed([], script, f"{OWN}-outside"))
    holds("reached the origin" in ways and "reached by resolve" in ways, ways)
    if place.engine.name == "podman":
        holds("reached another address" in ways and any("resolver" in way for way in ways), ways)


@check
def the_compose_example(place):
    engine = place.engine
    folder = place.work / "examples/compose"
    shutil.copytree(ROOT / "examples/compose", folder)
    file = folder / "exeat/exeat.toml"
    file.write_text(place.widened(file.read_text()))
    override = {
        "services": {
            "exeat": {"image": f"{OWN}-exeat", "volumes": [f"{place.certificates}:/certificates:ro"]},
            "sandbox": {"image": f"{OWN}-tools"},
        },
        "networks": {"outside": {"external": True, "name": f"{OWN}-outside"}},
    }
    (folder / "compose.override.yaml").write_text(json.dumps(override))
    # As the file says it, without the build.
    (folder / "ca").mkdir()
    (folder / "ca").chmod(0o755)
    engine.compose(folder, "run", "--rm", "-T", "exeat", "ca", "init")
    bundle = engine.compose(folder, "run", "--rm", "-T", "exeat", "ca", "bundle")
    holds("BEGIN CERTIFICATE" in bundle, bundle)
    for name in ["ca.pem", "ca-bundle.pem"]:
        (folder / "ca" / name).write_text(bundle)
    env = engine.compose(
        folder, "run", "--rm", "-T", "exeat", "env", "--task", "research", "--format", "env-file", "--host", "exeat", "--ca-dir",
        "/ca", "--no-credentials")
    holds("HTTPS_PROXY=http://research:" in env and VALUE not in env, env)
    (folder / "sandbox.env").write_text(env)
    try:
        engine.compose(folder, "up", "-d", *(["--no-build"] if engine.name == "docker" else []))
        listed = engine.run("ps", "-a", "--format", "{{.Names}}").split()
        of = lambda service: next(name for name in listed if re.fullmatch(f"{OWN}[-_]{service}[-_]1", name))
        proxy, sandbox = of("exeat"), of("sandbox")
        place.wait("the sandbox", lambda: engine.inspect(sandbox)["State"]["Status"] == "exited")
        said = engine.run("logs", sandbox, may_fail=True)
        holds('"path": "/repos/rust-lang/rust"' in said, "the sandbox got", said, engine.run("logs", proxy, may_fail=True))
        holds(VALUE not in said and VALUE not in json.dumps(engine.inspect(sandbox)), "the sandbox has the key")
        seen = engine.run("logs", f"{OWN}-origin", may_fail=True)
        holds(f"authorization=Bearer {VALUE}" in seen, "the origin saw", seen)
        place.wait("health", lambda: place.is_healthy(proxy))
        is_confined(place, proxy)
        run = lambda script: engine.compose(
            folder, "run", "--rm", "-T", "--no-deps", "--entrypoint", SH, "sandbox", "-c", script, may_fail=True)
        assert_no_way_out(place, run)
        refused = run('curl -s -m 5 -o /dev/null -w "%{http_code}" https://evil.test/')
        holds("403" in refused, "another host is refused:", refused)
        os.kill(engine.inspect(proxy)["State"]["Pid"], 9)
        assert_no_way_out(place, run)
    finally:
        engine.compose(folder, "down", "-v", may_fail=True)


def serve(place, name, config, networks, more=()):
    """Starts exeat with a configuration, confined as the examples have it."""
    name = f"{OWN}-{name}"
    folder = place.work / name
    folder.mkdir()
    (folder / "exeat.toml").write_text(place.widened(config))
    engine = place.engine
    place.start(
        name,
        ["--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "-v", f"{folder}:/etc/exeat:ro",
         "-v", f"{place.certificates}:/certificates:ro", "-e", "GITHUB_TOKEN", "-e", "AGENT_TOKEN", *more],
        f"{OWN}-exeat", ["serve"], networks[0])
    for network in networks[1:]:
        engine.run("network", "connect", network, name)
    place.wait(f"{name}: {engine.run('logs', name, may_fail=True)}", lambda: place.is_healthy(name))
    return engine.address(name, networks[0])


def ask(place, proxy, path="/repos/x"):
    """Returns the status of a request of a sandbox."""
    return place.sandboxed(
        ["-e", f"HTTPS_PROXY=http://agent:{TOKENS['AGENT_TOKEN']}@{proxy}:3128"],
        f'curl -sk -m 10 -o /dev/null -w "%{{http_connect}} %{{http_code}}" -H "Exeat-Credential: GITHUB_TOKEN" https://api.github.com{path}').strip()


@check
def a_proxy_between_a_sandbox_and_an_origin(place):
    """The configuration of the sidecar, in a container of its own."""
    config = (ROOT / "config/sidecar.toml").read_text().replace("127.0.0.1:3128", "0.0.0.0:3128")
    proxy = serve(place, "sidecar", config, [f"{OWN}-inside", f"{OWN}-outside"])
    is_confined(place, f"{OWN}-sidecar")
    answer = ask(place, proxy)
    holds(answer == "200 200", "an allowed request:", answer, place.engine.run("logs", f"{OWN}-sidecar", may_fail=True))
    holds(ask(place, proxy, "/user").endswith("403"), "another path")
    assert_no_way_out(place, lambda script: place.sandboxed([], script))
    logs = place.engine.run("logs", f"{OWN}-sidecar", may_fail=True)
    holds('"event":"closed"' in logs and VALUE not in logs, "the log:", logs)
    place.engine.run("kill", "-s", "KILL", f"{OWN}-sidecar")
    holds(ask(place, proxy) == "000 000", "without the proxy")
    assert_no_way_out(place, lambda script: place.sandboxed([], script))


@check
def two_proxies_share_a_redis_server(place):
    place.start(f"{OWN}-redis", ["--user", "65533", "--read-only", "--cap-drop", "ALL"], f"{OWN}-tools",
                ["--save", "", "--protected-mode", "no"], f"{OWN}-outside", shutil.which("redis-server"))
    server = place.engine.address(f"{OWN}-redis", f"{OWN}-outside")
    config = (ROOT / "config/sidecar.toml").read_text().replace("127.0.0.1:3128", "0.0.0.0:3128")
    shared = (f'[ledger]\nstore = "redis://{server}"\nkey = "env:LEDGER_KEY"\n[plans.few.raw]\ncalls_per_minute = 5\n')
    config = config.replace("[tasks.agent]\n", f"{shared}[tasks.agent]\nplan = \"few\"\n")
    more = ["-e", f"LEDGER_KEY={'5a' * 32}"]
    proxies = [serve(place, f"proxy-{n}", config, [f"{OWN}-inside", f"{OWN}-outside"], more) for n in range(2)]
    answers = [ask(place, proxies[n % 2]) for n in range(7)]
    # Each proxy alone would let five through.
    holds(answers == ["200 200"] * 5 + ["200 429"] * 2, "the answers:", answers, place.engine.run("logs", f"{OWN}-proxy-0", may_fail=True))


def in_a_network_of_its_own():
    """Starts this program again in a network that leads nowhere, with what stands for the internet in it."""
    network, resolv = "EXEAT_CONTAINERS_NETWORK", Path(tempfile.gettempdir()) / f"exeat-containers-{os.getpid()}.conf"
    if network not in os.environ:
        os.environ[network] = "own"
        os.execvp("unshare", ["unshare", "--net", "--mount", sys.executable, *sys.argv])
    run = lambda *command: subprocess.run(command, check=True, capture_output=True)
    resolv.write_text(f"nameserver {RESOLVER}\n")
    # Where Podman keeps what does not depend on --root.
    for directory in ["/run", "/etc/containers/networks"]:
        Path(directory).mkdir(parents=True, exist_ok=True)
        run("mount", "-t", "tmpfs", "tmpfs", directory)
    run("mount", "--bind", str(resolv), os.path.realpath("/etc/resolv.conf"))
    resolv.unlink()
    run("ip", "link", "set", "lo", "up")
    for address in [WEB, RESOLVER]:
        run("ip", "address", "add", f"{address}/32", "dev", "lo")
    quiet = type("Quiet", (http.server.SimpleHTTPRequestHandler,), {"log_message": lambda *_: None, "directory": "/nowhere"})
    web = http.server.ThreadingHTTPServer((WEB, 80), quiet)
    threading.Thread(target=web.serve_forever, daemon=True).start()
    names = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    names.bind((RESOLVER, 53))

    def answer():
        while True:
            query, client = names.recvfrom(512)
            # One answer for every question: the address of the web server.
            record = bytes.fromhex("c00c00010001000000010004") + socket.inet_aton(WEB)
            names.sendto(query[:2] + bytes.fromhex("81800001000100000000") + query[12:].split(b"\0\0\x29")[0] + record, client)

    threading.Thread(target=answer, daemon=True).start()


def clean_up(engine, work):
    """Removes what was made here. One failure does not keep the rest."""
    def attempt(*command):
        try:
            return engine.run(*command, may_fail=True).split()
        except subprocess.TimeoutExpired:
            return []

    containers = [name for name in attempt("ps", "-a", "--format", "{{.Names}}") if name.startswith(OWN)]
    if containers:
        attempt("rm", "-f", "-v", *containers)
    attempt("network", "rm", f"{OWN}-inside", f"{OWN}-outside")
    attempt("rmi", "-f", f"{OWN}-exeat", f"{OWN}-tools")
    if engine.name == "podman":
        # Its storage is below `work`, and mounts layers there.
        for mount in reversed(Path("/proc/mounts").read_text().splitlines()):
            if (at := mount.split()[1]).startswith(f"{work}/"):
                subprocess.run(["umount", "-l", at], capture_output=True)


def main(binary):
    if not docker_answers() and podman_can_be_used():
        in_a_network_of_its_own()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("containers: ended by a signal"))
    work = Path(tempfile.mkdtemp(prefix="exeat-containers-"))
    engine = Engine(work)
    try:
        python = build_images(engine, binary, work) if engine.name else None
        if not engine.name or not engine.works():
            print("skipped, because no container engine runs here:")
            for function in CHECKS:
                print(f"  {function.__name__}")
            print(f"{len(CHECKS)} checks of containers")
            return
        place, skipped = Place(engine, work, python), []
        for function in CHECKS:
            if function is the_compose_example and not engine.compose_command:
                skipped.append(function.__name__)
                continue
            began = time.monotonic()
            function(place)
            print(f"  {function.__name__}: passed in {time.monotonic() - began:.0f} s, with {engine.name}")
        for name in skipped:
            print(f"skipped, because {engine.name} has no compose: {name}")
        print(f"containers: {len(CHECKS) - len(skipped)} checks passed, {len(skipped)} skipped")
    finally:
        if engine.name:
            clean_up(engine, work)
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    try:
        main(str(Path(sys.argv[1]).resolve()))
    except Failed as failed:
        sys.exit(f"containers: {failed}")
