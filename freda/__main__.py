"""`python -m freda`, and `torchrun -m freda train ...` for several processes."""

from freda.cli import main

if __name__ == "__main__":
    main()
