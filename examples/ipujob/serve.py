"""Answer over HTTP on which of two spirals points lie: POST [[x, y], ...], the answer is [side, ...].

curl -d '[[0.5, 0.1], [-1, 2]]' http://localhost:8080
"""

from __future__ import annotations

import argparse
import http.server
import json
import signal
import sys
from pathlib import Path

import torch
from train import Network

import poptorch


def answer(model: poptorch.PoplarExecutor, body: bytes) -> list[int]:
    """The sides of the points in a request's body, one micro-batch of one point after another.

    Raises:
        ValueError: the body is no list of pairs of numbers
    """
    points = torch.tensor(json.loads(body), dtype=torch.float32)
    if points.ndim != 2 or points.shape[1] != 2:
        raise ValueError(f"points must be of shape [count, 2], and are {list(points.shape)}")
    return [int(model(point[None])[0].argmax()) for point in points]


class Scores(torch.nn.Module):
    """A network without its loss."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def forward(self, points):
        return self.network.scores(points)


def handler(model: poptorch.PoplarExecutor) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            try:
                code, said = 200, answer(model, body)
            except (ValueError, TypeError) as error:
                code, said = 400, {"error": str(error)}
            text = json.dumps(said).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

    return Handler


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--port", type=int, default=8080, help="0: any that is free")
    parser.add_argument("--checkpoint", type=Path, help="of train.py; else random weights answer")
    flags = parser.parse_args()
    network = Network(stages=1)
    if flags.checkpoint:
        network.load_state_dict(torch.load(flags.checkpoint))
    model = poptorch.inferenceModel(Scores(network).eval())
    answer(model, b"[[0, 0]]")  # compiled before the first request
    server = http.server.HTTPServer(("", flags.port), handler(model))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print(f"serving on port {server.server_address[1]}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
