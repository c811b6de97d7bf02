import kvplug
from kvplug.engine import FlatPage

config = kvplug.Config.load("print.toml")
with kvplug.build_page_cache(config, engine="first", namespace=b"lesson") as cache:
    page = FlatPage(key=b"a page", view=memoryview(bytearray(1000)), layout=b"bytes")
    cache.put([page]).wait(10)
    cache.get([page]).wait(10)
