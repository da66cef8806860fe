"""TransferQueue's side of the spool benchmark: a producer and a consumer, each a Ray actor in a process of its own.

    producer ──kv_batch_put──► storage units (2 processes) + controller ──kv_batch_get──► consumer

Runs in the environment of locks/transferqueue.txt. The key-value interface is used because it was the faster one of the
client's two (beside put/get_meta/get_data); two storage units for the same reason. Columns are nested jagged tensors.
"""

from __future__ import annotations

import time
from typing import Any

import child
import payload
import ray
import torch
import transfer_queue
from omegaconf import OmegaConf
from tensordict import TensorDict

RAY_CPUS = 16
"""With few Ray CPUs TransferQueue waits for its storage units for ever."""
STORAGE_UNITS = 2
FIELDS = ("tokens", "loss_mask", "logprobs", "rewards")


def batches(data: payload.Payload, batch: int) -> list[tuple[list[str], TensorDict]]:
    """(keys, fields) of every call, ready before the clock starts."""
    cuts = list(zip(data.offsets[:-1].tolist(), data.offsets[1:].tolist(), strict=True))
    made = []
    for first in range(0, len(cuts), batch):
        some = cuts[first : first + batch]
        fields: dict[str, torch.Tensor] = {
            name: torch.nested.as_nested_tensor(
                [torch.from_numpy(getattr(data, name)[a:b].copy()) for a, b in some], layout=torch.jagged
            )
            for name in ("tokens", "loss_mask", "logprobs")
        }
        fields["rewards"] = torch.from_numpy(data.rewards[first : first + len(some)].copy())[:, None]
        made.append(([f"k{first + i}" for i in range(len(some))], TensorDict(fields, batch_size=len(some))))
    return made


def total(column: torch.Tensor, dtype: torch.dtype) -> float:
    """The sum of a column's values, by the cheapest way to touch them all."""
    if column.is_nested:
        column = (
            column.values()
            if column.layout == torch.jagged
            else torch.cat([row.reshape(-1) for row in column.unbind()])
        )
    return float(column.sum(dtype=dtype))


@ray.remote(num_cpus=0.1)
class Actor:
    """Producer or consumer."""

    def __init__(self) -> None:
        transfer_queue.init()

    def prepare(self, samples: int, batch: int) -> int:
        data = payload.make(samples)
        self.calls = batches(data, batch)
        self.expected = data.sums()
        return int(data.nbytes)

    def put(self, number: int) -> float:
        """Seconds until every call returned: the storage units have the values."""
        begin = time.perf_counter()
        for keys, fields in self.calls:
            transfer_queue.kv_batch_put(keys=keys, partition_id=f"p{number}", fields=fields)
        return time.perf_counter() - begin

    def get(self, number: int) -> float:
        """Seconds to get and sum every value."""
        sums = [0.0] * len(FIELDS)
        begin = time.perf_counter()
        for keys, _ in self.calls:
            got = transfer_queue.kv_batch_get(keys=keys, partition_id=f"p{number}")
            for i, name in enumerate(FIELDS):
                sums[i] += total(got[name], torch.int64 if i < 2 else torch.float64)
        seconds = time.perf_counter() - begin
        if not payload.agree(sums, self.expected):
            raise AssertionError(f"got {sums}, expected {self.expected}")
        return seconds

    def remove(self, number: int) -> None:
        transfer_queue.get_client().clear_partition(f"p{number}")


def main() -> None:
    ray.init(num_cpus=RAY_CPUS, include_dashboard=False, object_store_memory=1 << 30, logging_level="ERROR")
    storage = {"storage_backend": "SimpleStorage", "SimpleStorage": {"num_data_storage_units": STORAGE_UNITS}}
    transfer_queue.init(OmegaConf.create({"backend": storage}))
    producer, consumer = Actor.remote(), Actor.remote()  # type: ignore[attr-defined]

    def prepare(samples: int, batch: int) -> int:
        return int(max(ray.get([a.prepare.remote(samples, batch) for a in (producer, consumer)])))

    def on(actor: Any, name: str) -> Any:
        return lambda number: ray.get(getattr(actor, name).remote(number))

    child.serve(
        {"prepare": prepare, "put": on(producer, "put"), "get": on(consumer, "get"), "remove": on(producer, "remove")}
    )
    transfer_queue.close()
    ray.shutdown()


if __name__ == "__main__":
    main()
