"""What ``twobw compare`` does: a run beside what was predicted of it."""

from __future__ import annotations

from pathlib import Path

from twobw.config import Config, read_resolved_config
from twobw.planner.plan import Plan
from twobw.planner.prediction import predict
from twobw.profiler.profile import ModelProfile, load_profile
from twobw.reports.comparison_text import comparison_text
from twobw.training.machine import local_cluster
from twobw.training.planning import configuration_of, training_of
from twobw.training.run_folder import CONFIG, TIMELINE
from twobw.training.run_reading import Run, load_run


def run_compare_command(folder: Path, profile_file: Path | None = None) -> str:
    """The text of ``twobw compare``.

    Args:
        folder: of a run that has ended.
        profile_file: predict from this profile; ``None``: the run was started from a plan.

    Raises:
        ValueError: it has not ended, there is nothing to predict from, or the profile is of
            another model.
        OSError: a file cannot be read.
    """
    run = load_run(folder)
    if run.timeline is None or not run.batches:
        raise ValueError(f"{folder} has no {TIMELINE}: the run has not ended, or was killed")
    plan = run.plan
    if profile_file is not None:
        plan = plan_of_run(run, read_resolved_config(folder / CONFIG), load_profile(profile_file))
    if plan is None:
        raise ValueError(
            f"nothing was predicted for {folder}: it was not started from a plan. Give --profile, "
            f"which `twobw profile {folder / CONFIG}` writes"
        )
    if profile_file is None and run.plan_problem:
        raise ValueError(f"{run.plan_problem}; give --profile")
    peaks = [stage.peak_bytes for stage in run.batches[-1].stages]
    return comparison_text(plan, run.timeline, peaks)


def plan_of_run(run: Run, config: Config, profile: ModelProfile) -> Plan:
    """What a profile predicts of the layout that a run has.

    Raises:
        ValueError: the profile is of another model, or not of the microbatches' size.
    """
    parallel, training = config.parallel, config.training
    wanted = (config.model.name, training.precision, config.optimizer.name)
    profiled = (profile.model, profile.precision, profile.optimizer)
    if wanted != profiled:
        raise ValueError(
            f"the profile is of {', '.join(profiled)}; the run is of {', '.join(wanted)}"
        )
    pieces = parallel.num_microbatches * parallel.dp
    size, rest = divmod(training.global_batch_size, pieces)
    if rest or size not in profile.microbatch_sizes:
        sizes = ", ".join(map(str, profile.microbatch_sizes))
        raise ValueError(
            f"the run's microbatches have {training.global_batch_size} / {pieces} samples; "
            f"profiled were {sizes}"
        )
    configuration = configuration_of(config, size)
    cluster = local_cluster(profile.link, config.num_ranks)
    return predict(profile, cluster, training_of(config), configuration, run.split)
