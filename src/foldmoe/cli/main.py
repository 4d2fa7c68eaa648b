"""The ``foldmoe`` command."""

from __future__ import annotations

import typer

from foldmoe.cli.bench import app as bench
from foldmoe.cli.demo import demo
from foldmoe.cli.doctor import doctor
from foldmoe.cli.eval import evaluate
from foldmoe.cli.plan import plan
from foldmoe.cli.report import report
from foldmoe.cli.requantize import requantize
from foldmoe.cli.serve import serve
from foldmoe.cli.verify import verify
from foldmoe.cli.warmup import warmup

app = typer.Typer(
    name="foldmoe",
    help="MoE layers with the shared expert folded into the routed experts' launch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("plan")(plan)
app.command("verify")(verify)
app.command("requantize")(requantize)
app.add_typer(bench, name="bench")
app.command("demo")(demo)
app.command("doctor")(doctor)
app.command("eval")(evaluate)
app.command("report")(report)
app.command("warmup")(warmup)
app.command(
    "serve", context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False
)(serve)
