"""The spool: requests, shards and the ledger, all of them files.

trainer: RequestPlanner.release ──► RequestQueue.put ──► open/ ──► worker: RequestQueue.claim ──► claimed/WORKER/
                                                                                                      │ publish
trainer: Ledger.commit ◄── RequestPlanner.choose ◄── SHARDS/ ◄────────────────────────────────────────┘
"""
