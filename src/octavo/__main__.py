"""`python -m octavo`, where the script is not on the path."""

from octavo.cli import main

main()
