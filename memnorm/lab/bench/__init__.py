"""Measurements of cost: layers, training steps, data, memory and start-up, each as a ratio to torch's batch norm.

Whatever is compared takes turns within each round, so that a busy moment of the machine falls on all of it, and a
second batch norm among them is the noise floor. `targets` says what must be reached.
"""
