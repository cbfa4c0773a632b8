"""Places requests on Dynamo's workers by what each has computed before; Dynamo decides wherever we know nothing.

placement     a decision and its reason, and the evidence provider that takes it      (no Dynamo import)
requests      Dynamo's requests, answers and pins in our words                        (no Dynamo import)
router        one request: ask the provider, pin or follow, go around a dead worker   (no Dynamo import)
serve         the router as a component of a Dynamo deployment, over Dynamo's own KvRouter

The provider that follows documents is `semantickv.routing.worker_evidence`; `semantickv dynamo-router` joins the two.
"""
