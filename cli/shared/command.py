"""The class of all commands: it refuses renamed options and prints help in groups."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

from cli.shared.renamed import refuse_renamed


class ZooCommand(TyperCommand):
    """A verb of `zoo`. An option's group in the help is its `rich_help_panel`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {name for param in self.get_params(ctx) for name in (*param.opts, *param.secondary_opts)}
        refuse_renamed(args, known)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, then options without a group, then each group."""
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is None:
                continue
            argument = param.param_type_name == "argument"
            group = "Arguments" if argument else getattr(param, "rich_help_panel", None) or "Options"
            groups.setdefault(group, []).append(record)
        for title, records in groups.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)
