"""Child processes that report in lines of JSON: ``child`` is the parent's end, ``parent_link`` theirs."""
