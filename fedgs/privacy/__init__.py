"""What was released and what it costs: ledger, accountants, budget, limits, counts."""
