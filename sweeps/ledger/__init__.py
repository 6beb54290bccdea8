"""What is known of all nights: their records, the scaling ledger, regressions, targets, nodes."""
