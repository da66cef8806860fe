"""Half-played orders as files: what was generated of an order that is given back, for whoever goes on with it.

    claimed/W/ORDER.a0.v5 ──Part published──► parts/ORDER.p1.h5 ──claim renamed──► open/ORDER.a0.v5.p1 ──claim──► read, go on

The file is laid out, published and checked like a shard; the ticket's name says which one is to be gone on from, so an
order that was never given back costs nothing. Any part of an order is a true one, since all there is of an order follows
from its name: whoever finds the number taken adopts what is there. A part that is missing or damaged costs its tokens only.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from relax_hpc.records import Part, with_experts
from relax_hpc.run_dir import RunDir, RunError, names, publish
from relax_hpc.spool.orders import Order
from relax_hpc.spool.queue import Claim, Queue, Ticket
from relax_hpc.spool.shard import Compression, Shard, encode


def put_back(run: RunDir, queue: Queue, claim: Claim, part: Part, compression: Compression) -> bool:
    """Publish what there is of a claim and open the claim again; False when another's part was there first."""
    number = claim.ticket.parts + 1
    mine = publish_part(run, claim.order.id, number, claim.ticket.version, part, compression)
    if queue.put_back(claim, parts=number) and claim.ticket.parts:
        run.part(claim.order.id, claim.ticket.parts).unlink(missing_ok=True)
    return mine


def publish_part(
    run: RunDir, order_id: str, number: int, version: int, part: Part, compression: Compression = "none"
) -> bool:
    """Publish what there is of an order, of which `version` made the first token; False when another's part was there first."""
    meta = {"run": run.read_id(), "version": version, "turns": part.turns, "cut": part.cut}
    return publish(run.part(order_id, number), encode(order_id, with_experts(part.groups), meta, compression))


def read(run: RunDir, order: Order, ticket: Ticket) -> Part | None:
    """What a claimed order has already; None where it is begun, or begun again."""
    if not ticket.parts:
        return None
    try:
        with Shard(run.part(order.id, ticket.parts)) as shard:
            shard.check_owner(order.id, run.read_id())
            shard.validate()
            part = Part([shard.group(g) for g in range(len(shard.groups))], shard.meta["turns"], shard.meta["cut"])
    except RunError as error:
        logging.getLogger("parts").warning("order %s is played from its beginning: %s", order.id, error)
        return None
    return part


def remove(run: RunDir, outstanding: Collection[str], before: int) -> None:
    """Remove the parts of orders that were released for batches before `before` and are no longer outstanding."""
    for name in names(run.parts):
        order_id = name.partition(".")[0]
        if order_id not in outstanding and order_id[1:7].isdigit() and int(order_id[1:7]) < before:
            (run.parts / name).unlink(missing_ok=True)
