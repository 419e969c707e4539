"""`zoo top`: show the state of a running server in the terminal: devices, block instances, chains and migrations."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.shared.output import DEFAULT_STORE, UnusedStoreOption, human_bytes, plain_console, print_json
from zoo.errors import InputError

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

#: Most block instances, chains and migrations that are shown, the busiest first.
_ROWS = 12


def top(
    url: Annotated[str, typer.Argument(help="Address of the server.")] = "http://127.0.0.1:8000",
    interval: Annotated[float, typer.Option(help="Seconds between looks.", min=0.1)] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once, print and end.")] = False,
    api_key: Annotated[str | None, typer.Option(envvar="ZOO_API_KEY", help="Key that the server asks for.")] = None,
    store: UnusedStoreOption = DEFAULT_STORE,
    as_json: Annotated[bool, typer.Option("--json", help="Print the state as one JSON document and end.")] = False,
) -> None:
    """Show devices, instances, queues, pages, chains and moves of a running server. Ctrl-C ends it."""
    from rich.live import Live

    state = look(url, api_key)
    if as_json:
        print_json(state)
        return
    console = plain_console()
    first = _screen(url, state, None, interval)
    if once:
        console.print(first)
        return
    with Live(first, console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(interval)
                before, state = state, look(url, api_key)
                live.update(_screen(url, state, before, interval), refresh=True)
        except KeyboardInterrupt:
            return


def look(url: str, api_key: str | None) -> dict[str, Any]:
    """Return the server's `/zoo/state`. Raises InputError if it cannot be read."""
    import httpx

    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        answer = httpx.get(f"{url.rstrip('/')}/zoo/state", headers=headers, timeout=5.0)
        answer.raise_for_status()
        state = answer.json()
    except httpx.HTTPStatusError as error:
        raise InputError(f"{url} answers {error.response.status_code}; is --api-key right?") from None
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise InputError(f"{url} cannot be asked: {error}") from None
    if not isinstance(state, dict):
        raise _no_zoo(url)
    return state


def _screen(url: str, state: Mapping[str, Any], before: Mapping[str, Any] | None, seconds: float) -> RenderableType:
    """Return `picture` of untrusted input. Raises InputError if it has another structure."""
    try:
        return picture(state, before, seconds)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        raise _no_zoo(url) from None


def _no_zoo(url: str) -> InputError:
    return InputError(f"{url} does not answer as a server of this version of the zoo does")


def picture(state: Mapping[str, Any], before: Mapping[str, Any] | None, seconds: float) -> RenderableType:
    """Return one screen. `before` is the previous state, from `seconds` ago, for rates."""
    from rich.console import Group

    cluster = state.get("cluster")
    parts: list[RenderableType] = [_head(state, before, seconds)]
    if cluster is None:
        parts.append(_alone(state))
    else:
        parts += [_devices(cluster, None if before is None else before.get("cluster"), seconds), _instances(cluster)]
        parts += [_moves(cluster)] if cluster["migrations"] else []
        parts += [_groups(state["queue"])] if state.get("queue", {}).get("groups") else []
        parts += [_estimates(cluster)] if cluster.get("estimates") else []
        parts += [_links(cluster)] if any(each.get("links") for each in cluster["devices"]) else []
    parts.append(_models(state, cluster))
    return Group(*parts)


def _head(state: Mapping[str, Any], before: Mapping[str, Any] | None, seconds: float) -> str:
    counters = state["counters"]
    rate = _rate(
        counters["generated_tokens"], None if before is None else before["counters"]["generated_tokens"], seconds
    )
    speed = f"{rate} tokens/s, " if rate else ""
    line = (
        f"{state['running']} running, {state['waiting']} waiting, {speed}{counters['generated_tokens']} tokens in all"
    )
    line += f", {counters['preemptions']} preempted"
    if counters["speculations"]:
        line += f"; {counters['speculations']} hops predicted, {counters['speculation_hits']} rightly"
    if counters.get("stage_loads"):
        loaded = human_bytes(counters["loaded_bytes"])
        line += f"; {counters['stage_loads']} loads of {loaded}, {counters['stage_unloads']} unloads"
    if counters.get("swapped_out"):
        line += f"; K and V to host memory {counters['swapped_out']} times, back {counters['swapped_in']} times"
    cluster = state.get("cluster")
    if cluster is not None:
        totals = cluster["migration_totals"]
        line += (
            f"; migrations: {len(cluster['migrations'])} under way, {totals['committed']} done, "
            f"{totals['aborted']} given up"
        )
        line += (
            f", {totals['copied']} tokens copied, {totals['recomputed']} recomputed; {cluster['starved']} wait "
            "for pages"
        )
    return line + (" — draining" if state["draining"] else "")


def _alone(state: Mapping[str, Any]) -> Table:
    table = _table("device", "pages", "weights", "steps", "failed")
    for agent in state["agents"]:
        pages, counters = agent["pages"], agent["counters"]
        used = f"{pages['capacity'] - pages['free']} / {pages['capacity']}"
        table.add_row(
            str(agent["device"]),
            used,
            human_bytes(agent["memory"]["weights"]),
            str(counters["steps"]),
            str(counters["failed_steps"]),
        )
    return table


def _devices(cluster: Mapping[str, Any], before: Mapping[str, Any] | None, seconds: float) -> Table:
    hosts = any(each.get("host_memory") for each in cluster["devices"])
    host = ("host K and V", "host weights") if hosts else ()
    table = _table("device", "state", "pages", "weights", *host, "sequences", "queued", "busy", "tokens/s", "stages")
    old = {} if before is None else {each["device"]: each for each in before["devices"]}
    for each in cluster["devices"]:
        last = old.get(each["device"])
        busy = "" if last is None else f"{min(max(each['busy_ns'] - last['busy_ns'], 0) / seconds / 1e7, 100):.0f} %"
        state = "gone" if not each["alive"] else f"loading {len(each['loading'])}" if each["loading"] else "up"
        table.add_row(
            each["device"],
            state,
            f"{each['pages_used']} / {each['pages']}",
            _of(each["weights"], each.get("weights_limit", 0)),
            *((_of(each["host_kv"], each["host_memory"]), human_bytes(each["host_weights"])) if host else ()),
            str(each["sequences"]),
            str(each["queued"]),
            busy,
            _rate(each["tokens"], None if last is None else last["tokens"], seconds),
            str(len(each["stages"])),
        )
    return table


def _instances(cluster: Mapping[str, Any]) -> Table:
    table = _table("block", "device", "bytes", "sequences", "queue", title="block instances, the busiest first")
    for each in sorted(cluster["instances"], key=lambda one: (-one["queue"], -one["sequences"], one["block"]))[:_ROWS]:
        table.add_row(
            each["block"][:12], each["device"], human_bytes(each["nbytes"]), str(each["sequences"]), str(each["queue"])
        )
    return table


def _moves(cluster: Mapping[str, Any]) -> Table:
    table = _table("sequence", "from", "to", "tokens", "stage", title="on the way")
    for each in cluster["migrations"][:_ROWS]:
        stage = f"{each['stage']}{' (held)' if each['held'] else ''}"
        table.add_row(each["seq"], each["source"], each["target"], str(each["tokens"]), stage)
    return table


def _groups(queue: Mapping[str, Any]) -> Table:
    """Return the table of waiting groups, in their order; a forecast beyond the deadline is marked."""
    title = f"queue ({queue['plan']}): {queue['waiting']} waiting{_planned(queue.get('planned'))}"
    table = _table("model", "cell", "slo", "priority", "waiting", "due", "first ends", "last ends", title=title)
    cells = {number: each["cell"] for each in queue["virtual"] for number in each["groups"]}
    for each in queue["groups"][:_ROWS]:
        late = " !" if each["first_end"] > each["due"] else ""
        slo = "-" if each["slo_ms"] is None else f"{each['slo_ms']} ms"
        slo = slo if each["ttft_slo_ms"] is None else f"first {each['ttft_slo_ms']} ms"
        times = (f"{each[name]:.1f} s" for name in ("due", "first_end", "last_end"))
        table.add_row(
            each["model"], cells.get(each["id"], "-"), slo, str(each["priority"]), str(each["waiting"]) + late, *times
        )
    return table


def _planned(planned: Mapping[str, Any] | None) -> str:
    """Return what the planned order is, and why."""
    if not planned:
        return ""
    order = planned["solver"] or "by deadline"
    more = ", more devices wanted" if planned["scale_up_wanted"] else ""
    return f"; {order} ({planned['why']}), {planned['late']} late{more}"


def _estimates(cluster: Mapping[str, Any]) -> Table:
    table = _table("estimate", "latest", "median", "error", "bias", title="estimates beside what was measured")
    for each in cluster["estimates"]:
        median = f"{1000 * each['seconds']:.2f} ms"
        table.add_row(each["kind"], str(each["count"]), median, f"{each['error']:.0%}", f"{each['bias']:+.0%}")
    return table


def _of(nbytes: int, limit: int) -> str:
    return f"{human_bytes(nbytes)} / {human_bytes(limit)}" if limit else human_bytes(nbytes)


def _links(cluster: Mapping[str, Any]) -> Table:
    """Return the table of links, failed ones first: their transfers go through host memory."""
    table = _table("device", "to", "link", title="tensors from device to device")
    links = [(each["device"], to, said) for each in cluster["devices"] for to, said in each.get("links", {}).items()]
    for row in sorted(links, key=lambda one: (one[2] in ("direct", "making"), one))[:_ROWS]:
        table.add_row(*row)
    return table


def _models(state: Mapping[str, Any], cluster: Mapping[str, Any] | None) -> Table:
    table = _table("model", "running", "waiting", "blocks", "most used path")
    chains = {} if cluster is None else {each["model"]: each for each in cluster["chains"]}
    for each in sorted(state["models"], key=lambda one: (-one["running"] - one["waiting"], one["name"]))[:_ROWS]:
        chain = chains.get(each["name"])
        paths = [] if chain is None else sorted(chain["paths"], key=lambda one: -one[1])
        path = "" if not paths else " > ".join(dict.fromkeys(paths[0][0]))
        blocks = len(each.get("blocks", ())) if chain is None else len(chain["blocks"])
        table.add_row(each["name"], str(each["running"]), str(each["waiting"]), str(blocks), path)
    return table


def _table(*columns: str, title: str | None = None) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for at, column in enumerate(columns):
        number = column in (
            "bytes",
            "weights",
            "sequences",
            "queued",
            "queue",
            "busy",
            "tokens/s",
            "running",
            "waiting",
            "blocks",
            "tokens",
        )
        table.add_column(column, justify="right" if number and at else "left")
    return table


def _rate(now: int, before: int | None, seconds: float) -> str:
    return "" if before is None else f"{max(now - before, 0) / seconds:.0f}"
