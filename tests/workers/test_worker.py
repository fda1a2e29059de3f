from __future__ import annotations

import torch

from batchopt_workers.worker import Sample, Worker


def test_each_worker_has_a_state_of_its_own() -> None:
    one, other = Worker(0, 2, torch.device("cpu")), Worker(1, 2, torch.device("cpu"))
    one.state["key"] = 1
    assert other.state == {}


def test_a_worker_has_no_module_before_one_arrives() -> None:
    worker = Worker(0, 1, torch.device("cpu"))
    assert worker.module is None
    assert worker.criterion is None


def test_a_sample_has_neither_output_nor_loss_before_its_forward() -> None:
    sample = Sample(torch.zeros(1), None, None, range(1))
    assert sample.output is None
    assert sample.loss is None
