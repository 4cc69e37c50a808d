"""Run by torchrun: several pipelines, one after another, in one process group. Rank 0 saves what
each ended with; see tests/dist/test_processes.py."""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

import twobw
from tests.dist.programs import cases


def part(whole: torch.Tensor, pipeline: twobw.Pipeline) -> torch.Tensor:
    """This replica's part of a batch."""
    return whole.tensor_split(dist.get_world_size() // pipeline.num_stages)[pipeline.replica]


def main(which: str, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    outcomes = {}
    for name, case in getattr(cases, which).items():
        pipeline = twobw.Pipeline(
            case.layers(),
            case.loss_fn,
            case.optimizer,
            case.schedule,
            case.num_microbatches,
            dp=case.dp,
            seed=cases.SEED,
            timeout=30,
            **case.options,
        )
        torch.manual_seed(5)
        results = []
        for inputs, targets in case.data():
            mine = part(inputs, pipeline) if pipeline.is_first_stage else None
            wanted = part(targets, pipeline) if pipeline.is_last_stage else None
            results.append(pipeline.train_step(mine, wanted))
        if case.dp > 1:
            pipeline.check_replicas()
        state = pipeline.full_state_dict()
        losses = [float(result.loss) for result in results]
        inputs, targets = case.data()[0]
        evaluated = pipeline.evaluate(part(inputs, pipeline), part(targets, pipeline))
        timeline = pipeline.timeline()
        stages = [pipeline.stage] * dist.get_world_size()
        dist.all_gather_object(stages, pipeline.stage)
        if state is not None and timeline is not None:
            outcomes[name] = {
                "state": state,
                "losses": losses,
                "evaluated": evaluated,
                "ranks": timeline.ranks,
                "stages": stages,
                "norms": [r.grad_norm for r in results],
                "metrics": [len(r.stage_metrics() or ()) for r in results],
            }
        elif pipeline.stage > 0:
            assert results[0].stage_metrics() is None
        pipeline.close()
        undisturbed = torch.rand(3, generator=torch.Generator().manual_seed(5))
        assert torch.equal(torch.rand(3), undisturbed), "the caller's random stream goes on"
    if outcomes:
        torch.save(outcomes, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
