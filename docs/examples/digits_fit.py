"""Learns handwritten digits. Kill it at any time and start it again: the bits at the end are the same."""

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

import batchopt
from batchopt.training import Checkpoint, EveryEpoch, Record, fit


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(1) == targets).double().mean()


if __name__ == "__main__":
    torch.manual_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    layers = torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(128, 10)
    net = torch.nn.Sequential(*layers)
    record = Record("digits.jsonl")
    with batchopt.BatchOptimizer(
        net, torch.nn.CrossEntropyLoss(), optimizer="adam", parallelize=2, chunk_size=50, check_cut=False
    ) as opt:
        before = cross_entropy(net(x), y).item()
        fit(
            opt,
            batchopt.Batches((x[:1500], y[:1500]), 100, shuffle=True),
            epochs=30,
            eval_data=(x[1500:], y[1500:]),
            metrics={"loss": cross_entropy, "accuracy": accuracy},
            checkpoint=Checkpoint("digits", every=EveryEpoch(0.5), best=1, score="eval_accuracy", mode="max"),
            resume="auto",
            log=record,  # [record, "runs/"] writes for TensorBoard, too
        )
        record.plot("digits.png", keys=["loss", "eval_loss", "eval_accuracy"])
        print(opt.fingerprint())
    print(f"the loss falls from {before:.4f} to {record.lines()[-1]['loss']:.4f}")
