"""What the doctor asks of the workers' interpreter: versions, matrix rate, all-reduce. Its text is sent there.

The last word on the command line is JSON: ``do``, ``marker``, and what the function takes. The answer is one line
behind the marker. torch is whatever is installed there.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from typing import Any


def versions(args: dict[str, Any]) -> dict[str, Any]:
    """What a run depends on being alike."""
    import torch

    told: dict[str, Any] = {"version": platform.python_version(), "torch": torch.__version__}
    told["cuda"] = torch.version.cuda or ""
    told["hip"] = getattr(torch.version, "hip", None) or ""
    told["gpus"] = torch.cuda.device_count()
    if torch.cuda.is_available():
        nccl: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        told["nccl"] = ".".join(map(str, nccl)) if isinstance(nccl, tuple) else str(nccl)
    return told


def imports(args: dict[str, Any]) -> dict[str, Any]:
    """Nothing but the import."""
    import torch

    return {"torch": torch.__version__}


def matrix(args: dict[str, Any]) -> dict[str, Any]:
    """The rate of square products, FLOP/s of each accelerator, all at the same time; on processors of one rank."""
    import torch

    if args["device"] == "cpu":
        torch.set_num_threads(args["threads"])
    kind = getattr(torch, args["precision"])
    size, seconds = args["size"], args["seconds"]
    devices = ["cpu"] if args["device"] == "cpu" else [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    pairs = [torch.randn(2, size, size, device=device).to(kind) for device in devices]

    def round_of(number: int) -> float:
        began = time.perf_counter()
        for _ in range(number):
            for left, right in pairs:
                torch.mm(left, right)
        for device in devices:
            if device != "cpu":
                torch.cuda.synchronize(device)
        return time.perf_counter() - began

    round_of(3)
    each = max(round_of(3) / 3, 1e-6)
    batch, end = max(1, int(0.5 / each)), time.perf_counter() + seconds
    rates: list[float] = []
    while not rates or time.perf_counter() < end:
        rates.append(2.0 * size**3 * batch / round_of(batch))
    told: dict[str, Any] = {"rates": rates, "devices": len(devices)}
    for query in args["queries"]:
        for _ in range(batch * 4):
            for left, right in pairs:
                torch.mm(left, right)
        done = subprocess.run(query, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=30)
        told["under_load"] = done.stdout.decode(errors="replace")
        if "not a valid field" not in told["under_load"]:
            break
    for index, device in enumerate(devices):
        if device != "cpu":
            torch.cuda.synchronize(device)
            told.setdefault("each", []).append(_alone(pairs[index], batch, size))
    return told


def _alone(pair: Any, batch: int, size: int) -> float:
    """One accelerator's own rate, FLOP/s."""
    import torch

    began = time.perf_counter()
    for _ in range(batch):
        torch.mm(pair[0], pair[1])
    torch.cuda.synchronize(pair.device)
    return 2.0 * size**3 * batch / (time.perf_counter() - began)


def all_reduce(args: dict[str, Any]) -> dict[str, Any]:
    """Bus bandwidth of an all-reduce over all ranks: 2·(n−1)/n · bytes / seconds (nccl-tests' PERFORMANCE.md)."""
    ranks = range(args["first_rank"], args["first_rank"] + args["ranks"])
    program = "import sys; exec(sys.argv[1])"
    environ = {**os.environ, "MASTER_ADDR": args["address"], "MASTER_PORT": str(args["port"])}
    if args["device"] == "cuda":
        environ["NCCL_DEBUG"] = "INFO"
    if args["interface"]:  # the way to the peers; NCCL takes "=" for exactly this one
        environ |= {"GLOO_SOCKET_IFNAME": args["interface"], "NCCL_SOCKET_IFNAME": "=" + args["interface"]}
    requests = [json.dumps({**args, "do": "one_rank", "rank": rank}) for rank in ranks]
    argvs = [[sys.executable, "-c", program, args["program"], request] for request in requests]
    codes, said = _together(argvs, environ, args["deadline_s"])
    if len(codes) < len(argvs):
        return {"error": f"the ranks did not come together within {args['deadline_s']:.0f} s"}
    failed = [index for index, code in enumerate(codes) if code]
    if failed:
        lines = [line for line in said[failed[0]].splitlines() if line.strip()]
        return {"error": f"rank {ranks[failed[0]]}: {lines[-1] if lines else codes[failed[0]]}"}
    answers = [
        json.loads(line[len(args["marker"]) :])
        for text in said
        for line in text.splitlines()
        if line.startswith(args["marker"])
    ]
    wire = [line for text in said for line in text.splitlines() if "NCCL INFO" in line and " via " in line]
    nets = [line for text in said for line in text.splitlines() if "NCCL INFO" in line and "NET/" in line]
    return {"answers": answers, "lines": (nets + wire)[:20]}


def _together(argvs: list[list[str]], environ: dict[str, str], deadline_s: float) -> tuple[list[int], list[str]]:
    """Exit codes (none where one did not end in time; all are ended then) and outputs of programs side by side."""
    end = time.monotonic() + deadline_s
    with contextlib.ExitStack() as stack:
        # files, since NCCL writes more than a pipe holds
        outputs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in argvs]
        pairs = zip(argvs, outputs, strict=True)
        children = [subprocess.Popen(argv, env=environ, stdout=out, stderr=subprocess.STDOUT) for argv, out in pairs]
        codes: list[int] = []
        try:
            codes = [child.wait(max(0.1, end - time.monotonic())) for child in children]
        except subprocess.TimeoutExpired:
            pass
        finally:
            for child in children:
                child.kill()
                child.wait()
        for output in outputs:
            output.seek(0)
        return codes, [output.read() for output in outputs]


def one_rank(args: dict[str, Any]) -> dict[str, Any]:
    """One process of the all-reduce."""
    import datetime

    import torch
    import torch.distributed as dist

    world, cuda = args["world"], args["device"] == "cuda"
    if cuda:
        torch.cuda.set_device(args["rank"] - args["first_rank"])
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        rank=args["rank"],
        world_size=world,
        timeout=datetime.timedelta(seconds=args["deadline_s"]),
    )
    values = torch.ones(args["bytes"] // 4, device="cuda" if cuda else "cpu")
    best = float("inf")
    for _ in range(args["times"]):
        values.fill_(1.0)
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(values)
        if cuda:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    right = bool((values == world).all())
    dist.destroy_process_group()
    return {"rank": args["rank"], "bus": 2.0 * (world - 1) / world * 4 * values.numel() / best, "right": right}


def main() -> None:
    """Do what the last word asks, and answer."""
    args = json.loads(sys.argv[-1])
    known = (versions, imports, matrix, all_reduce, one_rank)
    answer = {function.__name__: function for function in known}[args["do"]](args)
    sys.stdout.write(args["marker"] + json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
