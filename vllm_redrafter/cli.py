"""The command line: `vllm-redrafter <command>`.

Commands import what they need when they run, so that `--help` is quick.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from vllm_redrafter.training.choices import (
    Initialisation,
    LossKind,
    Precision,
    TargetDtype,
    TeacherKind,
)

app = typer.Typer(no_args_is_help=True, add_completion=False)


def _integers(option: str, text: str) -> list[int]:
    from vllm_redrafter.errors import ConfigError

    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{option} {text!r}: expected integers with commas between") from error


@contextmanager
def _errors() -> Iterator[None]:
    """Errors that the user can mend: their message, and exit status 1."""
    from vllm_redrafter.errors import ConfigError, TrainingError

    try:
        yield
    except (ConfigError, TrainingError) as error:
        typer.secho(f"error: {error}", fg="red", err=True)
        raise typer.Exit(1) from error


@app.callback()
def main() -> None:
    """Recurrent Drafter (ReDrafter) tree speculation for vLLM."""


@app.command()
def demo(
    cache_dir: Annotated[
        Path | None,
        typer.Option(
            help="Where checkpoints and answers are kept and used again; delete it to start "
            "afresh.  [default: vllm-redrafter/demo in $XDG_CACHE_HOME or ~/.cache]",
            show_default=False,
        ),
    ] = None,
    target: Annotated[
        Path | None, typer.Option(help="Folder of a target to use instead of training one.")
    ] = None,
    drafter: Annotated[
        Path | None, typer.Option(help="Folder of a drafter to use instead of training one.")
    ] = None,
) -> None:
    """Train a small target and its drafter, then decode in vLLM without and with ReDrafter.

    Needs neither network nor GPU, and a few minutes on two cores.
    """
    from vllm_redrafter.demo.run import default_cache_dir, run_demo

    with _errors():
        run_demo(cache_dir or default_cache_dir(), target, drafter)


@app.command("generate-data")
def generate_data(
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="Writes the data: a folder or a hub id.")
    ],
    prompts: Annotated[
        str,
        typer.Option(
            help="What it answers: a file (.txt: a line is a prompt; .jsonl, .json, .parquet: "
            "rows with prompt, messages, or ShareGPT's conversations), or the hub id of a dataset."
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            help="Folder for the data. Where a run was stopped, the same command continues."
        ),
    ],
    split: Annotated[
        str | None,
        typer.Option(help="Split of a hub dataset.", show_default="train"),
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    top_p: Annotated[
        float, typer.Option(help="Draw among the most probable tokens of this total probability.")
    ] = 1.0,
    top_k: Annotated[
        int | None,
        typer.Option(help="Draw among the k most probable tokens.", show_default="all"),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="The most tokens of one answer.")] = 1024,
    seed: Annotated[int, typer.Option(help="Of the data.")] = 0,
    system_prompt: Annotated[
        str | None,
        typer.Option(help="For conversations without a system message of their own."),
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            help="The most tokens of a conversation; longer ones are truncated, or skipped if the "
            "first prompt is too long.",
            show_default="what the target allows",
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of the target, as vLLM takes it.")] = "auto",
    top_logprobs: Annotated[
        int,
        typer.Option(
            help="Keep the target's k most probable tokens with every token that it writes, so "
            "that distillation needs no second pass of the target."
        ),
    ] = 0,
    drafter: Annotated[
        str | None,
        typer.Option(help="A ReDrafter checkpoint to generate with: the same data, sooner."),
    ] = None,
    spec_tokens: Annotated[
        int | None,
        typer.Option(
            help="With --drafter: tree nodes verified per request and step.", show_default="12"
        ),
    ] = None,
    in_flight: Annotated[int, typer.Option(help="Conversations worked on at once.")] = 256,
    shard_size: Annotated[
        int, typer.Option(help="Conversations per shard: about what a stopped run loses.")
    ] = 256,
    enforce_eager: Annotated[
        bool, typer.Option("--enforce-eager", help="vLLM's: no compilation, no CUDA graphs.")
    ] = False,
) -> None:
    """Let the target answer prompts, and keep the answers as training data for a drafter.

    Conversations keep their user turns; every answer is written anew, by the target's chat
    template where it has one. The data comes in Parquet shards (see
    vllm_redrafter/data/dataset.py for the columns).
    """
    from rich.console import Console

    from vllm_redrafter.data import generation
    from vllm_redrafter.data.dataset import SamplingSettings
    from vllm_redrafter.data.prompts import read_prompts
    from vllm_redrafter.errors import ConfigError

    console = Console()
    try:
        if spec_tokens is not None and drafter is None:
            raise ConfigError("--spec-tokens is for --drafter: give both or neither")
        settings = generation.GenerationSettings(
            sampling=SamplingSettings(
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                max_tokens=max_tokens,
                seed=seed,
                max_model_len=max_model_len,
                dtype=dtype,
            ),
            system_prompt=system_prompt,
            top_logprobs=top_logprobs,
            shard_size=shard_size,
            in_flight=in_flight,
            drafter=drafter,
            spec_tokens=spec_tokens if spec_tokens is not None else generation.DEFAULT_SPEC_TOKENS,
            enforce_eager=enforce_eager,
        )
        conversations, left_out = read_prompts(prompts, split)
        if left_out:
            console.print(f"{left_out} conversations without a word from the user are left out")
        summary = generation.generate_data(target, conversations, output, settings, console)
        if summary.conversations:
            console.print(str(summary))
    except ConfigError as error:
        typer.secho(f"error: {error}", fg="red", err=True)
        raise typer.Exit(1) from error


@app.command()
def train(
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="The model to draft for: a folder or a hub id.")
    ],
    data: Annotated[Path, typer.Option(help="Folder that generate-data wrote with this target.")],
    output: Annotated[Path, typer.Option(help="Folder for the drafter and its checkpoints.")],
    loss: Annotated[
        LossKind,
        typer.Option(
            help="kl: the target's full distribution; ce: the text alone; mix: some of both."
        ),
    ] = "kl",
    kl_weight: Annotated[float, typer.Option(help="Share of kl in a mix.")] = 0.5,
    teacher: Annotated[
        TeacherKind,
        typer.Option(
            help="target: compute its distribution; data: take the recorded --top-logprobs."
        ),
    ] = "target",
    epochs: Annotated[int, typer.Option(help="Passes over the data.")] = 1,
    max_steps: Annotated[
        int | None, typer.Option(help="Optimizer steps, instead of epochs.", show_default="epochs")
    ] = None,
    batch_size: Annotated[
        int, typer.Option(help="Blocks per optimizer step, over all processes.")
    ] = 16,
    micro_batch_size: Annotated[int, typer.Option(help="Blocks a process reads at once.")] = 1,
    block_length: Annotated[
        int, typer.Option(help="Tokens of a block, into which conversations are packed.")
    ] = 2048,
    unroll_steps: Annotated[
        int, typer.Option(help="Drafted tokens to train for: the beam length to serve with.")
    ] = 5,
    step_decay: Annotated[float, typer.Option(help="Each further step counts so much less.")] = 1.0,
    learning_rate: Annotated[float, typer.Option(help="The peak.")] = 1e-3,
    warmup_steps: Annotated[int, typer.Option(help="Steps up to the peak.")] = 100,
    weight_decay: Annotated[float, typer.Option(help="On matrices.")] = 0.0,
    max_grad_norm: Annotated[float, typer.Option(help="Gradients are clipped to this.")] = 1.0,
    precision: Annotated[
        Precision, typer.Option(help="Of matrix products; no: the parameters' own.")
    ] = "no",
    target_dtype: Annotated[TargetDtype, typer.Option(help="Of the target.")] = "auto",
    exit_dim: Annotated[
        int | None,
        typer.Option(help="Width of the draft head.", show_default="the target's hidden size"),
    ] = None,
    num_draft_layers: Annotated[int, typer.Option(help="Residual blocks of the draft head.")] = 1,
    draft_vocab_size: Annotated[
        int | None,
        typer.Option(
            help="Rank only the tokens that the target uses most: a smaller, quicker head.",
            show_default="all",
        ),
    ] = None,
    init: Annotated[
        Initialisation,
        typer.Option(help="Of the head's last layer: lm_head (the target's) or random."),
    ] = "lm_head",
    held_out: Annotated[
        int, typer.Option(help="Conversations kept for tokens per target step.")
    ] = 64,
    beam_width: Annotated[int, typer.Option(help="Of that estimate.")] = 4,
    spec_tokens: Annotated[int, typer.Option(help="Of that estimate: tree nodes per step.")] = 12,
    evaluate_every: Annotated[int, typer.Option(help="Steps between estimates.")] = 200,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 500,
    seed: Annotated[int, typer.Option(help="Of weights, order, and what is held out.")] = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint in --output.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, time one step, write nothing.")
    ] = False,
    other_target: Annotated[
        bool,
        typer.Option(
            "--other-target",
            help="Allow data that another target with the same tokenizer wrote (a quantised copy).",
        ),
    ] = False,
) -> None:
    """Distil a drafter from what the target wrote.

    On several GPUs: accelerate launch -m vllm_redrafter train TARGET ...
    TensorBoard's logs are in OUTPUT/logs, checkpoints in OUTPUT/checkpoints.
    """
    from vllm_redrafter.config import ReDrafterConfig
    from vllm_redrafter.training.config import TrainingConfig
    from vllm_redrafter.training.run import TrainingRequest
    from vllm_redrafter.training.run import train as run

    with _errors():
        config = TrainingConfig(
            epochs=epochs,
            max_steps=max_steps,
            batch_size=batch_size,
            micro_batch_size=micro_batch_size,
            block_length=block_length,
            unroll_steps=unroll_steps,
            loss=loss,
            kl_weight=kl_weight,
            step_decay=step_decay,
            teacher=teacher,
            learning_rate=learning_rate,
            warmup_steps=warmup_steps,
            weight_decay=weight_decay,
            max_grad_norm=max_grad_norm,
            precision=precision,
            target_dtype=target_dtype,
            held_out=held_out,
            evaluate_every=evaluate_every,
            save_every=save_every,
            seed=seed,
            exit_dim=exit_dim,
            num_draft_layers=num_draft_layers,
            draft_vocab_size=draft_vocab_size,
            init=init,
        )
        speculation = ReDrafterConfig(spec_tokens, beam_width, unroll_steps)
        request = TrainingRequest(target, data, output, config, speculation, other_target)
        run(request, resume=resume, dry_run=dry_run)


@app.command()
def evaluate(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A folder or a hub id.")],
    drafter: Annotated[str, typer.Argument(metavar="DRAFTER", help="A folder or a hub id.")],
    data: Annotated[Path, typer.Option(help="Folder that generate-data wrote with this target.")],
    beam_widths: Annotated[str, typer.Option(help="Of the grid, comma-separated.")] = "1,2,4,8",
    beam_lengths: Annotated[str, typer.Option(help="Of the grid, comma-separated.")] = "3,4,5",
    spec_tokens: Annotated[
        str, typer.Option(help="Tree nodes per step, of the grid, comma-separated.")
    ] = "3,5,8,12,16,24,32",
    held_out: Annotated[
        int | None,
        typer.Option(
            help="Only so many conversations: with train's --held-out and --seed, those that "
            "the drafter was not trained on.",
            show_default="all",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the choice of --held-out.")] = 0,
    draft_cost: Annotated[
        float, typer.Option(help="Of a level of beam search, relative to a plain decoding step.")
    ] = 0.02,
    verify_cost: Annotated[
        float, typer.Option(help="Of a verified node, relative to a plain decoding step.")
    ] = 0.005,
    max_length: Annotated[int, typer.Option(help="Conversations are cut behind it.")] = 2048,
    target_dtype: Annotated[TargetDtype, typer.Option(help="Of the target.")] = "auto",
    plot: Annotated[Path | None, typer.Option(help="Draw a heat map into this PNG.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all figures to this file.")
    ] = None,
    other_target: Annotated[
        bool,
        typer.Option(
            "--other-target",
            help="Allow data that another target with the same tokenizer wrote (a quantised copy).",
        ),
    ] = False,
) -> None:
    """Say how many tokens a target step gives, without vLLM: for a grid of shapes.

    The decoding of the data's answers is replayed; vLLM reports the same when it decodes them.
    """
    from rich.console import Console

    from vllm_redrafter.training import evaluation

    with _errors():
        request = evaluation.EvaluationRequest(
            target=target,
            drafter=drafter,
            data=data,
            grid=evaluation.shapes(
                _integers("--beam-widths", beam_widths),
                _integers("--beam-lengths", beam_lengths),
                _integers("--spec-tokens", spec_tokens),
            ),
            costs=evaluation.StepCosts(draft_cost, verify_cost),
            held_out=held_out,
            seed=seed,
            max_length=max_length,
            target_dtype=target_dtype,
            other_target=other_target,
        )
        console = Console()
        found = evaluation.evaluate(request, console)
        evaluation.print_evaluation(console, found)
        if json_file:
            evaluation.write_json(found, json_file)
        if plot:
            evaluation.draw_heat_map(found, plot)


@app.command("convert")
def convert_checkpoint(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            help="A drafter, as a folder or a hub id: our format, Apple's, or TensorRT-LLM's "
            "tensor names; safetensors or PyTorch files, whole or in shards.",
        ),
    ],
    destination: Annotated[
        Path, typer.Argument(metavar="DST", help="Folder to write; it must not have any content.")
    ],
    to: Annotated[
        str, typer.Option(help="own: what vLLM serves; apple: what recurrent_drafting reads.")
    ] = "own",
    verifier: Annotated[
        str | None,
        typer.Option(help="Record this target's name.", show_default="what SRC records"),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16 or float16.", show_default="what SRC has"),
    ] = None,
) -> None:
    """Write a drafter's checkpoint in another form; in the same dtype, bit for bit the same."""
    from vllm_redrafter.checkpoints.conversion import convert

    with _errors():
        done = convert(source, destination, to, verifier, dtype)  # type: ignore[arg-type]  # checked there
        for note in done.notes:
            typer.echo(note)
        typer.echo(f"wrote {destination}")


@app.command()
def inspect(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CKPT", help="A drafter: a folder or a hub id.")
    ],
    target: Annotated[
        str | None,
        typer.Option(help="Check that the drafter fits this target; exit status 1 if not."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the same facts as JSON.")] = False,
) -> None:
    """Say what a drafter's checkpoint is: sizes, tensors, targets, training."""
    import json

    from rich.console import Console

    from vllm_redrafter.checkpoints import inspection
    from vllm_redrafter.errors import ConfigError

    with _errors():
        found = inspection.inspect_checkpoint(checkpoint)
        differences = inspection.misfits(found.config, target) if target else []
        if as_json:
            check = {"target_check": {"target": target, "differences": differences}}
            typer.echo(json.dumps(found.facts() | (check if target else {}), indent=2))
        else:
            inspection.print_inspection(Console(), found)
        if differences:
            raise ConfigError(f"the drafter does not fit {target!r}: {'; '.join(differences)}")
        if target and not as_json:
            typer.echo(f"the drafter fits {target}")
