"""The dialects that agents speak to the gateway: `chat`, `messages`, `responses`, modules that fit `dialect.Dialect`.

Pure functions on plain dicts as orjson reads them: no I/O, no event loop, no network. Chat is the middle: every
upstream speaks it and every call is recorded in its terms.
"""
