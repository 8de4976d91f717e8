"""The one exception that the command line turns into a sentence and a non-zero exit status."""


class ConversionError(Exception):
    """The source, the destination or an option prevents a conversion; the message says which and what to do."""
