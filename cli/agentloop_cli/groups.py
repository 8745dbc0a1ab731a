"""Groups of commands that are also a command: the first word is a command, or it belongs to the default one."""

from __future__ import annotations

from typing import Any, ClassVar

from typer.core import TyperGroup


class FilterOrCommand(TyperGroup):
    """`agentloop GROUP FILTER` is `agentloop GROUP DEFAULT FILTER`: a filter has a `:`, and no command has."""

    default: ClassVar[str]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """See click."""
        if not args or (args[0] not in self.commands and args[0] not in ("--help", "-h")):
            args = [self.default, *args]
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed
