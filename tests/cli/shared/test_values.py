"""The options of `zoo serve` are declared once: help in groups, old names refused, known dependencies."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

import cli.app
from cli.serving.needs import NEEDS
from cli.serving.options import ServeOptions, gather
from cli.shared.declared import declared, flag_of
from cli.shared.renamed import RENAMED
from zoo.errors import InputError

GROUPS = {"Model", "Memory", "Queue", "Batching", "Cluster", "Approximations", "Observability", "Server"}
OPTIONS = [each for each in fields(ServeOptions) if not declared(each).table]
FLAGS = {flag_of(each.name) for each in OPTIONS}


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run the command with any of these verbs; return exit code, output and errors."""
    verbs = {name: cli.app.VERBS[name] for name in ("serve", "generate", "bench", "profile", "simulate")}
    monkeypatch.setattr(cli.app, "VERBS", verbs)
    monkeypatch.setenv("COLUMNS", "100")

    def run(*arguments: str) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.app.main(list(arguments))
        printed = capsys.readouterr()
        return ended.value.code, printed.out, printed.err

    return run


def test_help_of_serve_has_every_option_in_its_group(ran) -> None:
    code, text, _ = ran("serve", "--help")
    assert code == 0
    sections = {part.split(":\n", 1)[0].strip(): part for part in text.split("\n\n") if ":\n" in part}
    assert set(sections) == GROUPS | {"Arguments", "Options"}
    for each in OPTIONS:
        assert f"  {flag_of(each.name)} " in sections[declared(each).group] + " ", each.name
    assert "--kv-cache-memory-bytes SIZE" in sections["Memory"] and "1GiB" in sections["Memory"]
    assert "--prefix-caching off|active|cached" in text


@pytest.mark.parametrize("old", sorted(RENAMED))
def test_an_old_name_is_refused_with_the_new_one(ran, old: str, tmp_path: Path) -> None:
    new = RENAMED[old]
    assert new in FLAGS and old not in FLAGS
    for argument in ((old, "1"), (f"{old}=1",)):
        assert ran("serve", *argument) == (2, "", f"zoo: {old} is now {new}\n")
    key = old.removeprefix("--")
    (tmp_path / "serve.toml").write_text(f"{key} = 1\n")
    with pytest.raises(InputError, match=f"{key.replace('-', '_')} is now {new[2:].replace('-', '_')}"):
        gather(tmp_path / "serve.toml", {})


def test_other_commands_refuse_old_names_too_but_keep_options_of_their_own(ran) -> None:
    for command in ("generate", "bench", "profile"):
        assert ran(command, "model", "--kv-bytes", "1MiB")[2] == "zoo: --kv-bytes is now --kv-cache-memory-bytes\n"
    assert ran("simulate", "--log", "x")[2] == "zoo: --log is now --scheduler-log\n"
    assert "is now" not in ran("bench", "--sharing", "off")[2], "it never had this option"
    assert "is now" not in ran("generate", "no-such-model", "--", "--kv-bytes")[2], "a prompt is no option"


def test_commands_that_take_an_option_of_serve_take_all_of_it(ran) -> None:
    for command in ("generate", "bench"):
        _, text, _ = ran(command, "--help")
        assert "--executor auto|paged|dense" in text and "--kv-cache-memory-bytes SIZE" in text
        code, out, errors = ran(command, *(["model", "x"] if command == "generate" else []), "--executor", "sparse")
        assert (code, out, errors) == (2, "", "zoo: --executor must be auto, paged or dense, not 'sparse'\n")


def test_every_option_says_what_it_is_and_needs_what_is_known() -> None:
    for each in fields(ServeOptions):
        said = declared(each)
        assert said.group in GROUPS and said.help.endswith((".", "traces.")), each.name
        assert set(said.needs) <= NEEDS.keys(), each.name
        assert not said.choices or each.default in (None, *said.choices), each.name
    assert {name for each in fields(ServeOptions) for name in declared(each).needs} == NEEDS.keys(), (
        "a condition of no option"
    )


@pytest.mark.parametrize("name", [each.name for each in fields(ServeOptions) if declared(each).choices])
def test_a_value_that_is_no_choice_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=f"{flag_of(name)} must be .* or .*, not 'nonsense'"):
        gather(None, {name: "nonsense"})


@pytest.mark.parametrize(
    ("changed", "beside"),
    [
        *(({name: value}, {}) for name, value in {
            "activation_cache_bytes": "1MiB", "placement": "partition", "routing": "least-loaded", "rebalance": "owner",
            "dispatch": "broadcast", "tensor_transport": "direct", "speculation": "exact",
        }.items()),
        ({"batch_wait_us": 0}, {"backend": "local"}),
        ({"batch_wait_us": 0}, {"backend": "inline"}),
        *(({name: value}, {"executor": "paged"}) for name, value in {
            "dense_mode": "pd", "dense_slots": 4, "dense_padding": "computed", "dense_prompts": "beside",
        }.items()),
        ({"async_scheduling": "on"}, {"executor": "dense"}),
        ({"min_stitched": 0.9}, {"agents": 2}),
        ({"speculation_lane": "shared"}, {"agents": 2}),
    ],
)  # fmt: skip
def test_an_option_without_effect_is_refused(changed: dict[str, object], beside: dict[str, object]) -> None:
    gather(None, beside)
    with pytest.raises(InputError, match=f"{flag_of(next(iter(changed)))} has no effect"):
        gather(None, beside | changed)


def test_options_have_an_effect_where_what_they_need_is_there() -> None:
    several = gather(
        None,
        {
            "agents": 2,
            "placement": "partition",
            "routing": "least-loaded",
            "rebalance": "owner",
            "dispatch": "broadcast",
            "tensor_transport": "direct",
            "speculation": "exact",
            "speculation_lane": "shared",
            "batch_wait_us": 0,
            "prefix_caching": "cached",
            "max_batch_per_block": 4,
            "serve_deltas": True,
            "min_equivalence": 0.9,
            "min_stitched": 0.8,
        },
    )
    cluster, relay = several.cluster(), several.agent()
    assert (cluster.placement, cluster.routing, cluster.control.rebalance) == ("partition", "least-loaded", "owner")
    assert (cluster.dispatch, cluster.prefix_caching, cluster.max_batch_per_block) == ("broadcast", "cached", 4)
    assert (cluster.speculation.mode, cluster.speculation.lane, relay.batch_wait_us) == ("exact", "shared", 0)
    dense = (
        gather(
            None,
            {
                "executor": "dense",
                "dense_mode": "pd",
                "dense_slots": 4,
                "dense_padding": "computed",
                "dense_prompts": "beside",
            },
        )
        .engine()
        .dense
    )
    assert (dense.mode, dense.slots, dense.padding, dense.prompts) == ("pd", 4, "computed", "beside")


def test_no_old_name_was_forgotten() -> None:
    assert set(RENAMED) == {
        "--token-budget",
        "--max-sequences",
        "--kv-bytes",
        "--sharing",
        "--placing",
        "--paths",
        "--linger-us",
        "--balancing",
        "--tensors",
        "--block-rows",
        "--boundary-bytes",
        "--otel",
        "--log",
        "--deltas",
        "--equivalent",
        "--stitched",
    }
    assert (
        RENAMED["--sharing"] == "--prefix-caching"
        and RENAMED["--paths"] == "--routing"
        and RENAMED["--log"] == "--scheduler-log"
    )


def test_tables_of_the_file_set_every_switch_of_the_controllers(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(
        'agents = 2\nspeculation = "exact"\n'
        "[control]\nscaling = false\nlocality = false\nrearranging = false\nproactive = false\nhigh = 0.7\n"
        "idle_ms = 0\ncooldown_ms = 0\nrearrange_interval_ms = 5000\nbandwidth = 2e9\n"
        "[speculation_limits]\ntop = 0.2\nthreshold = 1\n"
        "[cluster_limits]\nswap_patience_ms = 0\n"
    )
    made = gather(file, {"rebalance": "owner"}).cluster()
    control, speculated = made.control, made.speculation
    assert (control.scaling, control.locality, control.rearranging, control.proactive) == (False,) * 4
    assert (control.high, control.idle_ms, control.cooldown_ms, control.rearrange_interval_ms) == (0.7, 0, 0, 5000)
    assert (control.bandwidth, control.rebalance) == (2e9, "owner")
    assert (speculated.mode, speculated.top, speculated.threshold, made.swap_patience_ms) == ("exact", 0.2, 1, 0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("agents = 2\ncontrol = 1", "control must be a table of scaling"),
        ("agents = 2\n[control]\nscales = true", r"unknown key 'scales' in \[control\]; known are scaling"),
        ("agents = 2\n[control]\nrebalance = 'owner'", "unknown key 'rebalance'"),
        ("agents = 2\n[control]\nscaling = 1", "control.scaling must be bool, not 1"),
        ("agents = 2\n[control]\nidle_ms = 0.5", "control.idle_ms must be int, not 0.5"),
        ("agents = 2\n[control]\nbandwidth = nan", r"\[control\]: .*bandwidth more than 0"),
        ("agents = 2\n[control]\nlow = 0.9", r"\[control\]: control needs 0 <= low < high"),
        ("[control]\nscaling = false", r"\[control\] has no effect on one device"),
        ("agents = 2\n[speculation_limits]\ntop = 0.2", r"\[speculation_limits\] has no effect where no hop"),
        ("[cluster_limits]\nswap_patience_ms = -1", "swap_patience_ms and shared_prompt_bytes are at least 0"),
    ],
)
def test_a_wrong_table_gives_one_line(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(text)
    with pytest.raises(InputError, match=said) as raised:
        gather(file, {})
    assert "\n" not in str(raised.value)
