"""`python -m dspark_jax {generate,evaluate,info,demo} ...`"""

import sys

from dspark_jax.commands import main

if __name__ == "__main__":
    sys.exit(main())
