"""Our own evidence on two-way memory: which runs, how they are run, and the tables made of them."""
