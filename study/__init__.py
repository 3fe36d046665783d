"""Our own evidence: which runs, how they are run, and the tables, figures and pages made of them."""
