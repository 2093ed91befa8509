"""The files that ``recommend`` writes: a configuration in the form that a program reads, and the command that starts it.

A form (:class:`~zeroplan.interop.forms.configuration.Form`) is one program's way to be told of a run. Reading such files is the
business of the other modules of :mod:`zeroplan.interop`; a form never reads.
"""
