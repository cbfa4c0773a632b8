"""What goes over the wire: the request and answer shapes of OpenAI and SGLang, checked by hand, no web framework."""
