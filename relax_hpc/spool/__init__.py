"""The spool: requests, shards and the ledger, all of them files.

trainer: RequestPlanner.release ──► Queue.put ──► open/ ──► worker: Queue.claim ──► claimed/WORKER/
                                                                                        │ publish
trainer: Ledger.commit ◄── RequestPlanner.choose ◄── SHARDS/ ◄──────────────────────────┘
"""
