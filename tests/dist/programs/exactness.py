"""Run by torchrun: several pipelines, one after another, in one process group. Rank 0 saves what
each ended with; see tests/dist/test_processes.py."""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

import twobw
from tests.dist.programs import cases


def main(out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    outcomes = {}
    for name, case in cases.CASES.items():
        pipeline = twobw.Pipeline(
            case.layers(),
            case.loss_fn,
            case.optimizer,
            case.schedule,
            case.num_microbatches,
            seed=cases.SEED,
            timeout=30,
        )
        results = []
        for inputs, targets in case.data():
            needs_inputs, needs_targets = pipeline.is_first_stage, pipeline.is_last_stage
            results.append(
                pipeline.train_step(
                    inputs if needs_inputs else None, targets if needs_targets else None
                )
            )
        state = pipeline.full_state_dict()
        losses = [float(result.loss) for result in results]
        evaluated = pipeline.evaluate(*case.data()[0])
        timeline = pipeline.timeline()
        if state is not None and timeline is not None:
            outcomes[name] = {
                "state": state,
                "losses": losses,
                "evaluated": evaluated,
                "ranks": timeline.ranks,
                "metrics": [len(r.stage_metrics() or ()) for r in results],
            }
        else:
            assert results[0].stage_metrics() is None
    if outcomes:
        torch.save(outcomes, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
