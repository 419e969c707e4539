"""`zoo simulate`: run the real scheduler over a simulated cluster in virtual time.

It runs a paper's experiment (a preset) or a scenario file. This module is the command; the simulation is in
`runtime.sim`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cli.shared.output import DEFAULT_STORE, JsonOption, UnusedStoreOption


def simulate(
    preset: Annotated[
        str | None,
        typer.Option(
            help="blockllm, blockllm-{load,apps,table2,kv,placement,adaptive,speculation,accuracy,figure7,swap}, "
            "qlm-classes, infinite, scale, full-device.",
            show_default="blockllm",
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A scenario of your own: TOML or JSON.", dir_okay=False)] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of everything drawn.")] = 0,
    policies: Annotated[
        list[str] | None, typer.Option("--policy", help="Only this one; may be given again.", show_default="all")
    ] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="So many, at the scenario's rate.")] = None,
    devices: Annotated[
        int | None, typer.Option(min=1, max=65_536, help="So many, in servers like the scenario's last one.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write the first run's events here (JSONL).", dir_okay=False)
    ] = None,
    scheduler_log: Annotated[
        Path | None,
        typer.Option(
            help="Write the first run's scheduler log here: every event, a digest of every answer.", dir_okay=False
        ),
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(help="Instead: give a log to a new scheduler, and see if it answers the same.", dir_okay=False),
    ] = None,
    save_requests: Annotated[
        Path | None,
        typer.Option(
            help="Write what is asked here (JSONL); a scenario reads it as asked.kind = file.", dir_okay=False
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the report and its pictures into this folder.", file_okay=False)
    ] = None,
    store: UnusedStoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Run a cluster in virtual time: the same scheduler as `zoo serve`, simulated devices and links."""
    if replay is not None:
        _replay(replay, as_json)
        return
    from cli.shared.progress import counting
    from cli.simulate.report import deliver
    from runtime.sim.experiments.presets import alone, preset_named
    from runtime.sim.experiments.scenario import read_scenario
    from runtime.sim.experiments.study import narrowed, run_study
    from runtime.sim.workload.requests import write_demand
    from zoo.errors import InputError

    if preset is not None and config is not None:
        raise InputError("give --preset or --config, not both")
    chosen = alone(read_scenario(config)) if config is not None else preset_named(preset or "blockllm")
    chosen = narrowed(chosen, requests, devices, policies or ())
    if save_requests is not None:
        try:
            write_demand(chosen.cases[0].scenario.demand(seed), save_requests)
        except OSError as error:
            raise InputError(f"{save_requests} cannot be written: {error.strerror}") from None
    with counting("simulating", as_json) as progress:
        document = run_study(chosen, seed, trace, scheduler_log, progress)
    deliver(document, as_json, out)


def _replay(log: Path, as_json: bool) -> None:
    """Replay a scheduler log. Exit code 1 if the answers differ."""
    from cli.shared.output import print_json, say_error
    from runtime.scheduler.observe.replay_log import Diverged
    from runtime.scheduler.observe.replay_log import replay as played

    try:
        events, differs = played(log), None
    except Diverged as error:
        events, differs = None, str(error)
    if as_json:
        print_json({"log": str(log), "events": events, "same": differs is None, "differs": differs})
    elif differs is None:
        print(f"{events:,} events, the same answers")
    else:
        say_error(differs)
    if differs is not None:
        raise typer.Exit(1)
