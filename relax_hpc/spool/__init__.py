"""The spool: orders, shards and the ledger, all of them files.

trainer: OrderBook.release ──► Queue.put ──► open/ ──► worker: Queue.claim ──► claimed/WORKER/
                                                          │
trainer: Ledger.commit ◄── OrderBook.choose ◄── SHARDS/ ◄─┘ publish
"""
