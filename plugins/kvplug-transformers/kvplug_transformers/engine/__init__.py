"""A small paged engine: the reference for how an engine calls a connector.

Read it in this order: ``blocks`` (the pages), ``sequence`` (one request's life), ``scheduler`` (decides, and
talks to the scheduler side of the connector), ``batch`` (where each token goes), ``pages`` and ``attention``
(the paged cache inside a Hugging Face model), ``worker`` (computes, and talks to the worker side), ``engine``
(one loop around both). In tensor parallel, ``workers`` takes the worker's place: it runs ``rank`` in several
processes, each of which has a worker with a part of the model, and merges their ``reports``.
"""
