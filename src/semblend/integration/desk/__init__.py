"""What an engine that schedules and computes in one process decides about requests and donors, whatever its name.

reuse_desk     where each request is: lookup, load, donors, receipts
records        what is known about one request until it is released
kept_donors    donor KV in memory of our own
settings       what each of these engines can be told

It knows slots and tokens and no engine: SGLang and TensorRT-LLM are adapters over it.
"""
