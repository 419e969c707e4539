r"""Bring the engine up on one GPU: correctness against transformers, speed against the bandwidth of the memory.

    python -m benchmarks.gpu_bringup [--device cuda] [--output FOLDER] [--budget 530] [--only NAME …] [--small]

One command, at most nine minutes, no network. Each check runs in a process of its own with a time limit, so one that
fails or hangs does not stop the rest. The report is a table (printed last, and `report.txt`) and `report.json`, written
again after every check. The exit code is 1 if a check has failed or timed out.

It needs torch 2.11 or later, transformers, peft, safetensors and numpy, and of Block Zoo's other dependencies those
that the store needs: SQLAlchemy, Alembic, Mako, msgspec and blake3. Where nothing can be installed, carry these as a
folder, made on a machine with a network for the Python version there, and put it on PYTHONPATH:

    pip install --target wheels --no-deps --only-binary=:all: --python-version 3.12 \
        sqlalchemy alembic mako msgspec blake3

`--device cpu --small` runs the same checks with tiny models, in two minutes on two cores.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu.isolation import (
    Check,
    CheckResult,
    RunSettings,
    own_command,
    report_of,
    run_checks,
    run_one,
    table_of,
)

_COMPARED, _ONE_B = ("make-compared",), ("make-1b",)
#: In the order of what is worth most if the time runs out.
CHECKS = (
    Check("machine", "benchmarks.gpu.speed:describe_machine", 60),
    Check("attention", "benchmarks.gpu.agreement:check_attention", 60),
    Check("make-compared", "benchmarks.gpu.models:make_compared", 60),
    Check("float32", "benchmarks.gpu.agreement:check_float32", 60, _COMPARED),
    Check("bfloat16", "benchmarks.gpu.agreement:check_bfloat16", 60, _COMPARED),
    Check("recorded-float32", "benchmarks.gpu.agreement:check_recorded_float32", 60, _COMPARED),
    Check("recorded-bfloat16", "benchmarks.gpu.agreement:check_recorded_bfloat16", 60, _COMPARED),
    Check("lora-float32", "benchmarks.gpu.agreement:check_lora_float32", 90, _COMPARED),
    Check("lora-bfloat16", "benchmarks.gpu.agreement:check_lora_bfloat16", 90, _COMPARED),
    Check("make-1b", "benchmarks.gpu.models:make_1b", 90),
    Check("decode-1b", "benchmarks.gpu.speed:measure_1b", 90, _ONE_B),
    Check("variants", "benchmarks.gpu.speed:measure_variants", 120, _ONE_B),
    Check("make-7b", "benchmarks.gpu.models:make_7b", 90),
    Check("decode-7b", "benchmarks.gpu.speed:measure_7b", 120, ("make-7b",)),
    Check("prompts", "benchmarks.gpu.speed:measure_prompts", 60, _ONE_B),
    Check("sampling", "benchmarks.gpu.speed:measure_sampling", 45),
    Check("memory-share", "benchmarks.gpu.speed:check_memory_share", 45),
)


#: Packages without which no check can run.
NEEDED = ("torch", "transformers", "peft", "safetensors", "numpy", "sqlalchemy", "alembic", "mako", "msgspec", "blake3")


def main(arguments: list[str] | None = None) -> int:
    """Run the checks, or one of them in this process; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path, default=Path("gpu-bringup"), help="folder of the report and the logs")
    parser.add_argument("--budget", type=float, default=530.0, help="seconds for all checks together")
    parser.add_argument(
        "--only", nargs="+", choices=[check.name for check in CHECKS], help="run these and what they need"
    )
    parser.add_argument("--small", action="store_true", help="tiny models, for a machine without a GPU")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--check", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.check:  # the process of one check
        run_one(
            next(check for check in CHECKS if check.name == args.check),
            RunSettings(args.folder, args.device, args.small),
        )
        return 0
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        parser.error(f"packages are missing: {', '.join(missing)}; this module's docstring says how to carry them")
    chosen = CHECKS if not args.only else _with_needs(args.only)
    args.output.mkdir(parents=True, exist_ok=True)
    about = {"device": args.device, "small": args.small}
    results: list[CheckResult] = []

    def told(result: CheckResult) -> None:
        results.append(result)
        print(table_of([result]).splitlines()[0], flush=True)
        (args.output / "report.json").write_text(json.dumps(report_of(results, about), indent=1) + "\n")
        (args.output / "report.txt").write_text(table_of(results) + "\n")

    with tempfile.TemporaryDirectory() as scratch:
        settings = RunSettings(Path(scratch), args.device, args.small)
        run_checks(chosen, own_command(settings), settings, args.budget, told)
    print("\n" + table_of(results))
    return int(any(each.status in ("failed", "timed out") for each in results))


def _with_needs(names: list[str]) -> tuple[Check, ...]:
    """Return the named checks and those that they need, in the usual order."""
    wanted = set(names).union(*(check.needs for check in CHECKS if check.name in names))
    return tuple(check for check in CHECKS if check.name in wanted)


if __name__ == "__main__":
    sys.exit(main())
