"""Child processes that report in lines of JSON: ``child`` is the parent's side, ``parent_link`` theirs."""
