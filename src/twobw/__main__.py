"""``python -m twobw``: the same as the ``twobw`` command."""

from twobw.cli import main

main()
