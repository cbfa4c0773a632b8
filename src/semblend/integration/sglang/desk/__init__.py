"""What the cache decides about requests and donors. It knows slots and tokens; SGLang is looked at in `requests` alone.

reuse_desk     where each request is: lookup, load, donors, receipts
records        what is known about one request until it is released
requests       a request of SGLang as the desk sees it
kept_donors    donor KV in memory of our own
"""
