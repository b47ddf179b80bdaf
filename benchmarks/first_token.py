"""The first token through HTTP: how long one prompt waits for it, on a server that has nothing else to do.

    python benchmarks/first_token.py MODEL [--lengths 16 128 1024] [--count 20] [-- OPTIONS OF headrace serve]

Starts `headrace serve MODEL` and waits until it is ready. Then prompts of random ids, one at a time, over a connection that
stays open: milliseconds from the request's bytes to those of the first token. No two prompts share a prefix.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import statistics
import time

from first_minute import options_behind, serving

PAUSE = 0.01  # seconds between a stream's end and the next request


def first_token(connection: socket.socket, model: str, ids: list[int]) -> float:
    """Seconds."""
    asked = {"model": model, "prompt": ids, "max_tokens": 2, "temperature": 0, "ignore_eos": True, "stream": True}
    body = json.dumps(asked).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    began, answer, first = time.perf_counter(), b"", 0.0
    connection.sendall(head.encode() + body)
    while b"[DONE]" not in answer or not answer.endswith(b"0\r\n\r\n"):
        more = connection.recv(1 << 16)
        if not more or not (answer + more).startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"the server says {answer + more!r}")
        answer += more
        if not first and b"data:" in answer:
            first = time.perf_counter() - began
    return first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--lengths", type=int, nargs="+", default=[16, 128, 1024])
    parser.add_argument("--count", type=int, default=20)
    given, options = options_behind()
    args = parser.parse_args(given)
    rng = random.Random(1)
    with serving(args.model, options, {}) as server:
        print(f"ready after {server.ready_after:.2f} s", flush=True)
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for length in args.lengths:
                times = []
                for _ in range(args.count):
                    times.append(1e3 * first_token(connection, args.model, [rng.randrange(10, 500) for _ in range(length)]))
                    time.sleep(PAUSE)
                median, most = statistics.median(times), max(times)
                told = f"the very first {times[0]:.2f}, median {median:.2f}, best {min(times):.2f}, worst {most:.2f}"
                print(f"first token of {length:5} tokens, ms: {told}", flush=True)


if __name__ == "__main__":
    main()
