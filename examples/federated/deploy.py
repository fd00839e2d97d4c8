"""Real server and client processes of Flower on this computer; a client and the server are killed and started again.

    python examples/federated/deploy.py fleet-run         # some minutes; models and logs are in the folder fleet-run

A `flower-superlink` and two `flower-supernode`s on 127.0.0.1, without TLS: for anything but a look, give both
certificates. `flwr run` sends the app in this folder to them. After the first round a client is killed, with all that
it has started, and the rounds go on without it; it comes back. Then the server is killed. Another one, started in the
same folder, goes on from the model that `keep` has there. Flower installs nothing: both use the Python they run on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

HERE = Path(__file__).parent
Process = subprocess.Popen[bytes]


class Fleet:
    """The processes, by name."""

    def __init__(self, folder: Path, *, clients: int, rounds: int, timeout: int, patience: float) -> None:
        self.folder, self.clients, self.rounds, self.timeout = folder, clients, rounds, timeout
        self.ends = time.monotonic() + patience
        self.ports = free_ports(1 + clients)
        self.running: dict[str, Process] = {}
        self.keep, self.lines = folder / "keep", folder / "rounds.jsonl"
        home = folder / "flower"
        home.mkdir(parents=True, exist_ok=True)
        address = f"127.0.0.1:{self.ports[0]}"
        about = f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "{address}"\ninsecure = true\n'
        (home / "config.toml").write_text(about, encoding="utf-8")
        programs = str(Path(sys.executable).parent)  # Flower starts its own programs by name
        self.environment = {
            **os.environ,
            "FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0", "OMP_NUM_THREADS": "1",
            "PATH": os.pathsep.join([programs, os.environ.get("PATH", "")]),
        }  # fmt: skip

    def start(self, name: str, *command: str) -> None:
        log = (self.folder / f"{name}.log").open("ab")
        with log:
            self.running[name] = subprocess.Popen(
                command, stdout=log, stderr=log, env=self.environment, cwd=self.folder
            )

    def start_server(self) -> None:
        self.start(
            "server", "flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(self.ports[0]),
            "--database", str(self.folder / "superlink.db"), "--disable-runtime-dependency-installation",
        )  # fmt: skip
        self.wait(lambda: is_open(self.ports[0]), "the server to listen")

    def start_client(self, number: int) -> None:
        self.start(
            f"client-{number}", "flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{self.ports[0]}",
            "--host", "127.0.0.1", "--port", str(self.ports[1 + number]), "--node-config", f"partition-id={number}",
        )  # fmt: skip

    def send_app(self) -> None:
        """Start the rounds; `least` of the clients must be there at the beginning of each."""
        settings = {
            "rounds": self.rounds, "clients": self.clients, "least": 1, "timeout": float(self.timeout),
            "keep": str(self.keep), "out": str(self.lines),
        }  # fmt: skip
        written = " ".join(f"{key}={json.dumps(value)}" for key, value in settings.items())
        command = ["flwr", "run", str(HERE), "here", "--run-config", written]
        sent = subprocess.run(command, env=self.environment, cwd=self.folder, capture_output=True, check=False)
        if sent.returncode:
            raise SystemExit(f"flwr run: {sent.stdout.decode()}{sent.stderr.decode()}")

    def kill(self, name: str) -> None:
        """At once, with all that it started: nothing can be tidied up first."""
        process = self.running.pop(name)
        with contextlib.suppress(psutil.NoSuchProcess):
            top = psutil.Process(process.pid)
            for one in (top, *top.children(recursive=True)):  # the first one first: it would start others anew
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
        process.wait()

    def round(self) -> int:
        """The last round that ended: its model is in the folder by then, and has been measured."""
        if not self.lines.exists():
            return 0
        whole = [line for line in self.lines.read_text(encoding="utf-8").splitlines(keepends=True) if line[-1] == "\n"]
        return int(json.loads(whole[-1])["round"]) if whole else 0

    def wait(self, until: Callable[[], bool], what: str) -> None:
        while not until():
            for name, process in self.running.items():
                if process.poll() is not None:
                    raise SystemExit(f"{name} ended with {process.returncode}: see {self.folder / name}.log")
            if time.monotonic() > self.ends:
                raise SystemExit(f"Waited too long for {what}: see the logs in {self.folder}")
            time.sleep(0.2)


@contextlib.contextmanager
def fleet(
    folder: Path, *, clients: int = 2, rounds: int = 4, timeout: int = 60, patience: float = 900
) -> Iterator[Fleet]:
    """No process outlives the block."""
    folder.mkdir(parents=True, exist_ok=True)
    made = Fleet(folder.absolute(), clients=clients, rounds=rounds, timeout=timeout, patience=patience)
    try:
        yield made
    finally:
        for name in list(made.running):
            made.kill(name)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def is_open(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def drill(made: Fleet) -> None:
    """Kill a client, then the server, and have the rounds go on."""
    made.start_server()
    for number in range(made.clients):
        made.start_client(number)
    made.send_app()
    made.wait(lambda: made.round() >= 1, "round 1")
    print(f"round {made.round()} is kept; a client is killed")
    made.kill(f"client-{made.clients - 1}")
    before = made.round()
    made.wait(lambda: made.round() > before, f"round {before + 1}")
    print(f"round {made.round()} is kept; the client is started again, and the server is killed")
    made.start_client(made.clients - 1)
    made.kill("server")
    before = made.round()
    made.start_server()
    made.send_app()
    made.wait(lambda: made.round() > before, f"round {before + 1}")
    print(f"round {made.round()} is kept by the new server")
    made.wait(lambda: made.round() >= made.rounds, f"round {made.rounds}")
    for line in map(json.loads, made.lines.read_text(encoding="utf-8").splitlines()):
        print(f"round {line['round']:>2}: {line['accuracy']:.1%} of 500 test images")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for models and logs")
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4)
    asked = parser.parse_args()
    with fleet(asked.folder, clients=asked.clients, rounds=asked.rounds) as made:
        drill(made)


if __name__ == "__main__":
    main()
