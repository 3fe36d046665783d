"""`python -m memnorm.lab` is the command `memnorm`."""

from memnorm.lab.cli import program

if __name__ == "__main__":
    program()
