"""The command."""

import click


@click.command()
@click.option("--times", default=1, help="How often.")
def kept(times):
    """Say what is kept."""
    click.echo(" ".join(["the first plugin API"] * times))
