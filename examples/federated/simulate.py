"""Ten clients that know unlike digits, simulated on this computer by Flower's engine, which runs them on Ray.

    python examples/federated/simulate.py --strategy aligned-common --apart --rounds 4
    python examples/federated/simulate.py --strategy krum --hostile 2 --flip 5

Each client has images of its own (Dirichlet; a small --alpha gives clients that know few digits) and trains a stock
ViT for 20 steps a round. With --apart each starts from random weights of its own. The accuracy on 500 test images after
each round is printed. fleet/strategies.py has the strategies; benchmarks/federated.py compares them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

HERE = str(Path(__file__).parent)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [HERE, os.environ.get("PYTHONPATH")]))  # of Ray's processes
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, HERE)


def main() -> None:
    from fleet.client_app import app as client_app
    from fleet.server_app import make
    from fleet.strategies import STRATEGIES
    from flwr.simulation import run_simulation

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", choices=STRATEGIES, default="fedavg")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--alpha", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--apart", action="store_true", help="each client starts from random weights of its own")
    parser.add_argument("--hostile", type=int, default=0, help="how many clients flip the sign of their updates")
    parser.add_argument("--flip", type=float, default=1.0, help="and multiply them by this")
    parser.add_argument("--cores", type=int, default=1, help="how many clients train at the same time")
    parser.add_argument("--keep", help="a folder for the model after each round")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rounds.jsonl"
        settings = {key: value for key, value in vars(asked).items() if key not in ("cores", "keep")}
        server = make({**settings, "keep": str(Path(asked.keep).absolute()) if asked.keep else "", "out": str(out)})
        run_simulation(
            server,
            client_app,
            num_supernodes=asked.clients,
            backend_config={
                "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
                "init_args": {"num_cpus": asked.cores, "include_dashboard": False},
            },
        )
        for line in map(json.loads, out.read_text(encoding="utf-8").splitlines()):
            print(
                f"round {line['round']:>2}: {line['accuracy']:.1%} of 500 test images, {line['bytes']:,} bytes received"
            )


if __name__ == "__main__":
    main()
