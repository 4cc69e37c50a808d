"""The command line: parse, call, print. Torch is loaded only by the commands that compute."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from signal import SIGINT
from typing import Annotated, Literal

from cyclopts import App, CycloptsError, Parameter, Token

from twobw import __version__
from twobw.config import SETTINGS, ConfigError, load_config
from twobw.training.stopping import die_on

app = App(
    name="twobw",
    help="Pipeline-parallel training of PyTorch models that never drains (PipeDream-2BW).",
    version=__version__,
)


def _whole_number(kind: object, tokens: Sequence[Token]) -> int:
    """An option's value; cyclopts itself would round 2.5 to 2.

    Raises:
        ValueError: it is no whole number.
    """
    try:
        return int(tokens[0].value)
    except ValueError:
        raise ValueError(f"{tokens[0].value!r} is not a whole number") from None


_Int = Annotated[int, Parameter(converter=_whole_number)]
_SETTINGS = "Settings: " + ", ".join(SETTINGS)


@app.command(help_epilogue=_SETTINGS)
def train(
    config: Annotated[Path | None, Parameter(allow_leading_hyphen=True)] = None,
    /,
    *settings: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)],
    parallel: str | None = None,
    cluster: Path | None = None,
    resume: Path | None = None,
) -> int:
    """Train a model as a TOML file says, or go on with a run.

    Starts the ranks on this machine, or is one of them under torchrun. Any setting of the file can
    be given here too: --section.key value. Ctrl-C finishes the batch, saves weights and a
    checkpoint, and exits.

    Parameters
    ----------
    config
        The TOML file.
    parallel
        A plan that `twobw plan` has written: stages, replicas, microbatches, schedule, split and
        recompute are taken from it. Or `auto`: the model is profiled on this machine first, and
        the best plan is chosen and shown.
    cluster
        For `auto`: a TOML file that describes the devices, instead of this machine's.
    resume
        Instead of a TOML file, the folder of a run: go on from its newest whole checkpoint, with
        its config. Stages, replicas, split, schedule and global batch may be set anew.
    """
    if config is not None and str(config).startswith("--"):
        config, settings = None, (str(config), *settings)
    if (config is None) == (resume is None):
        raise ValueError("train takes a TOML file, or --resume and the folder of a run")
    overrides = parse_settings(settings)
    if resume is not None:
        from twobw.training.resuming import check_resumed, config_to_resume

        config, kept = config_to_resume(resume)
        overrides = {**kept, **overrides}
    assert config is not None
    from twobw.training.planning import AUTO, Planned, choose_plan, config_of_plan

    if cluster is not None and parallel != AUTO:
        raise ValueError(f"--cluster {cluster} needs --parallel {AUTO}")
    if parallel is None or parallel == AUTO:
        planned = Planned(load_config(config, overrides))
    else:
        planned = config_of_plan(config, overrides, Path(parallel))
    die_on([SIGINT])  # some import inside torch swallows Python's KeyboardInterrupt
    from twobw.training.initial_weights import check_initial_weights
    from twobw.training.samples import check_samples
    from twobw.training.worker import has_outer_launcher, run_rank

    check_initial_weights(planned.config)
    data = check_samples(planned.config)
    if parallel == AUTO:
        from twobw.profiler.measure import measure_profile

        planned = choose_plan(config, overrides, planned.config, cluster, measure_profile)
    if resume is not None:
        check_resumed(resume, planned.config, data)
    if has_outer_launcher():
        return run_rank(planned.config, planned.files, resume)
    from twobw.profiler.analytic import compute_profile
    from twobw.profiler.device import find_device
    from twobw.training.launch import launch
    from twobw.training.resources import check_resources

    # of the device described only that attention is fused counts here
    check_resources(planned.config, partial(compute_profile, device=find_device("a100-80gb")))
    return launch(planned.config, planned.files, resume)


@app.command(help_epilogue=_SETTINGS)
def profile(
    config: Path,
    /,
    *settings: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)],
    microbatch_sizes: str = "1,2,4,8",
    device: str | None = None,
    out: Path | None = None,
) -> None:
    """Find out what each layer of a model costs: the time of its forward, backward and recompute,
    what it keeps in between, the time of its update; and what messages between ranks cost.

    Measures on this machine, with as many ranks at work as the file says. Any setting of the file
    can be given here too: --section.key value.

    Parameters
    ----------
    config
        The TOML file.
    microbatch_sizes
        Samples of a microbatch, for each size to profile.
    device
        Compute the profile for this device instead, without the hardware: v100-16gb, a100-40gb,
        a100-80gb, h100-80gb, or a TOML file that describes one.
    out
        Where to write the profile; by default NAME.profile.json in the folder of runs.
    """
    from twobw.profiler.command import run_profile_command

    checked = load_config(config, parse_settings(settings))
    die_on([SIGINT])  # as for train
    sys.stdout.write(run_profile_command(checked, microbatch_sizes, device, out) + "\n")


@app.command
def schedule(
    name: str | None = None,
    /,
    *,
    stages: _Int | None = None,
    microbatches: _Int | None = None,
    batches: _Int | None = None,
    format: Literal["grid", "csv"] = "grid",
    check: Path | None = None,
    rule: str | None = None,
    extra_in_flight: _Int = 0,
    update_lag: _Int = 0,
) -> int:
    """Print a schedule, what each stage holds, and what the checker says of it.

    Parameters
    ----------
    name
        2bw, 2bw-fresh, paci, 1f1b, gpipe, weight-stashing or no-pipeline.
    stages
        Pipeline stages.
    microbatches
        Microbatches of a batch.
    batches
        Batches to show.
    format
        csv is the notation of torch.distributed.pipelining, a row a rank.
    check
        Check this CSV instead: as one flushed batch, unless a rule is given.
    rule
        The schedule whose versions and limits the CSV is checked by; needs --microbatches.
    extra_in_flight
        For 2bw, 2bw-fresh and paci: microbatches in flight beyond the usual, to hide slow links.
    update_lag
        For 2bw-fresh: microbatches that an update comes later, to hide what must be reduced.
    """
    from twobw.reports.schedule_text import run_schedule_command

    text, code = run_schedule_command(
        name,
        num_stages=stages,
        num_microbatches=microbatches,
        num_batches=batches,
        output_format=format,
        check_file=check,
        rule=rule,
        extra_in_flight=extra_in_flight,
        update_lag=update_lag,
    )
    sys.stdout.write(text + "\n")
    return code


@app.command
def plan(
    *,
    profile: Path,
    cluster: Path,
    global_batch: _Int,
    memory: float | None = None,
    top: _Int = 10,
    cost_model: Literal["simulation", "paper"] = "simulation",
    out: Path | None = None,
) -> int:
    """Choose how a model is spread over a cluster: stages, replicas, microbatches, recompute,
    schedule. Prints the best, what each would take in time and memory, and what does not fit.

    Parameters
    ----------
    profile
        What `twobw profile` has written.
    cluster
        A TOML file: devices a node, nodes, memory of a device, links.
    global_batch
        Samples of a batch.
    memory
        Gigabytes (1e9 bytes) that training may use of a device, instead of the cluster's.
    top
        How many to print.
    cost_model
        paper is the closed form and the search of the 2BW paper, for comparison.
    out
        Where to write the best plan.
    """
    from twobw.reports.plan_text import run_plan_command

    text, code = run_plan_command(
        profile, cluster, global_batch, memory_gb=memory, top=top, cost_model=cost_model, out=out
    )
    sys.stdout.write(text + "\n")
    return code


@app.command
def cluster(*, measure: bool = False, threads: _Int = 1, out: Path = Path("cluster.toml")) -> None:
    """Describe this machine for `twobw plan`: its devices, their memory, the link between two.

    A device is a GPU or, without any, the cores that a rank's threads take.

    Parameters
    ----------
    measure
        Measure the link between two ranks.
    threads
        Threads of a rank, as [training] num_threads.
    out
        Where to write the description, a TOML file.
    """
    from twobw.profiler.command import run_cluster_command

    die_on([SIGINT])  # as for train
    sys.stdout.write(run_cluster_command(threads, out, measures=measure) + "\n")


@app.command
def simulate(
    plan: Path | None = None,
    /,
    *,
    schedule: str | None = None,
    stages: _Int | None = None,
    microbatches: _Int | None = None,
    batches: _Int = 100,
    forward_ms: float = 1.0,
    backward_ms: float = 2.0,
    transfer_ms: float = 0.0,
    extra_in_flight: _Int = 0,
    trace: Path | None = None,
) -> None:
    """Play a plan, or a schedule of equal stages, without hardware: time of a batch, and why each
    rank waits.

    Parameters
    ----------
    plan
        What `twobw plan` has written; or give --schedule.
    schedule
        2bw, 2bw-fresh, paci, 1f1b, gpipe, weight-stashing or no-pipeline.
    stages
        Pipeline stages.
    microbatches
        Microbatches of a batch.
    batches
        Length of the run, in batches.
    forward_ms
        A microbatch's forward on a stage.
    backward_ms
        A microbatch's backward on a stage.
    transfer_ms
        A message from one stage to the next.
    extra_in_flight
        For 2bw, 2bw-fresh and paci: microbatches in flight beyond the usual, to hide slow links.
    trace
        Where to write a few batches for ui.perfetto.dev.
    """
    from twobw.reports.timeline_text import run_simulate_command

    text = run_simulate_command(
        plan,
        schedule=schedule,
        num_stages=stages,
        num_microbatches=microbatches,
        num_batches=batches,
        forward_ms=forward_ms,
        backward_ms=backward_ms,
        transfer_ms=transfer_ms,
        extra_in_flight=extra_in_flight,
        trace=trace,
    )
    sys.stdout.write(text + "\n")


@app.command
def compare(run: Path, /, *, profile: Path | None = None) -> None:
    """Set what was predicted of a run beside what it measured: time of a batch, busy and idle time
    and memory of each stage, and what throughput was lost to.

    Parameters
    ----------
    run
        The folder of a run that has ended.
    profile
        Predict from this profile; needed for a run that was not started from a plan.
    """
    from twobw.training.comparison import run_compare_command

    sys.stdout.write(run_compare_command(run, profile) + "\n")


@app.command
def report(source: Path, /, *, out: Path | None = None) -> None:
    """Write one HTML page on a run or a plan: what was predicted above what was measured, rank by
    rank; memory; loss and throughput; what the plan was chosen among. It needs no network.

    Parameters
    ----------
    source
        A run's folder, or what `twobw plan` has written.
    out
        Where to write the page; by default report.html in the run's folder, or beside the plan.
    """
    from twobw.training.report_page import run_report_command

    sys.stdout.write(run_report_command(source, out) + "\n")


@app.command
def doctor(*, folder: Path = Path("runs"), ranks: _Int = 2) -> int:
    """Look at this machine: versions and backends of torch, cores, GPUs, memory, shared memory,
    clock, disk, the link between two ranks; under torchrun the links and clocks of all ranks.

    Parameters
    ----------
    folder
        Where runs go.
    ranks
        How many are to train on this machine.
    """
    from twobw.training.doctor import run_doctor_command

    text, code = run_doctor_command(folder, ranks)
    if text:
        sys.stdout.write(text + "\n")
    return code


@app.command
def sample(
    run: Path,
    /,
    *,
    prompt: str = "",
    tokens: _Int = 400,
    temperature: float = 0.8,
    top_k: _Int | None = None,
    seed: _Int = 0,
) -> None:
    """Write text with the weights of a run: those it ended with, even where it kept better ones.

    Parameters
    ----------
    run
        The run's folder.
    prompt
        The text to go on from.
    tokens
        How many tokens (bytes) to write.
    temperature
        0 takes the likeliest token each time; higher is wilder.
    top_k
        Choose among this many of the likeliest tokens only.
    seed
        The same seed writes the same text.
    """
    from twobw.training.report import readable
    from twobw.training.sampling import sample_run

    text = sample_run(run, prompt.encode(), tokens, temperature=temperature, top_k=top_k, seed=seed)
    sys.stdout.write(prompt + readable(text) + "\n")


@app.command
def export(
    run: Path,
    /,
    *,
    format: Literal["safetensors", "dcp"] = "safetensors",
    out: Path | None = None,
) -> None:
    """Write the newest weights of a run, and the model's settings, for other tools.

    Parameters
    ----------
    run
        The run's folder. Of a run that has not ended, its newest whole checkpoint is taken.
    format
        dcp is that of torch.distributed.checkpoint.
    out
        The folder to write; by default `export` in the run's.
    """
    from twobw.training.exporting import export_run

    sys.stdout.write(f"{export_run(run, format, out)}\n")


@app.command(name="import", help_epilogue=_SETTINGS)
def import_(
    weights: Path,
    config: Path,
    /,
    *settings: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)],
) -> None:
    """Make a run that starts from the weights in a file, and say how it is trained.

    Any setting of the TOML file can be given here too: --section.key value.

    Parameters
    ----------
    weights
        A safetensors file: of `twobw export`, or the weights of a run.
    config
        The TOML file.
    """
    from twobw.training.exporting import import_weights
    from twobw.training.invocation import invocation

    folder = import_weights(weights, config, parse_settings(settings))
    sys.stdout.write(f"{invocation()} train --resume {shlex.quote(str(folder))}\n")


def parse_settings(tokens: Sequence[str]) -> dict[str, str]:
    """``--section.key value`` and ``--section.key=value`` by dotted name; the last one counts.

    Raises:
        ConfigError: a token that is neither a name nor a name's value.
    """
    settings: dict[str, str] = {}
    left = list(tokens)
    while left:
        token = left.pop(0)
        name, equals, value = token.removeprefix("--").partition("=")
        if not token.startswith("--"):
            raise ConfigError("command line", [f"{token!r} is not of the form --section.key value"])
        if not equals:
            if not left or left[0].startswith("--"):
                raise ConfigError("command line", [f"{token} has no value; write {token} VALUE"])
            value = left.pop(0)
        settings[name] = value
    return settings


def main(tokens: Sequence[str] | None = None) -> None:
    """The ``twobw`` command with these arguments, by default those of the process.

    What the user can put right is one message and exit code 2.
    """
    try:
        app(sys.argv[1:] if tokens is None else tokens, exit_on_error=False)
    except CycloptsError:  # it has printed its message
        sys.exit(2)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"twobw: {error}\n")
        sys.exit(2)
