"""Places requests on Dynamo's workers by what each has computed before; Dynamo decides wherever we know nothing.

placement     a decision and its reason, and the evidence provider that takes it     (no Dynamo import)
requests      Dynamo's preprocessed requests and chunks in our words                 (no Dynamo import)
router        one request: ask the provider, pin or follow, go around a dead worker  (no Dynamo import)
http_pin      the same pin over HTTP, for a stock frontend                           (no Dynamo import)
fake_workers  workers that do what a test tells them                                 (no Dynamo import)
workers       what Dynamo's own KvRouter says and does
serve         the router as a component of a Dynamo deployment
versions      which Dynamo versions are known, and how well; support_table: what a deployment may have

The provider that follows documents is `semantickv.routing.worker_evidence`; `semantickv dynamo-router` joins the two.
"""
