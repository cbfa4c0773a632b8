"""What checkouts add to a request of 33 kB, in alternating rounds: python one_stack.py CHECKOUT... [ROUNDS] [--quiet]

With --quiet twenty requests in a row count only if the machine was idle before them and a quarter idle while they ran (Linux)."""
import subprocess,sys,time,json,socket,random,statistics as st,os,urllib.request
PY=sys.executable
TREES=[a for a in sys.argv[1:] if not a.isdigit() and a!='--quiet']; ROUNDS=int(next((a for a in sys.argv if a.isdigit()),25)); QUIET='--quiet' in sys.argv
ENGINE='''
import asyncio
BODY=b'{"id":"x","object":"text_completion","model":"m","choices":[{"index":0,"text":"hello","finish_reason":"stop"}],"usage":{"prompt_tokens":8000,"completion_tokens":1,"total_tokens":8001}}'
async def h(r,w):
    try:
        while True:
            head=await r.readuntil(b"\\r\\n\\r\\n")
            n=0
            for l in head.lower().split(b"\\r\\n"):
                if l.startswith(b"content-length:"): n=int(l[15:])
            if n: await r.readexactly(n)
            w.write(b"HTTP/1.1 200 OK\\r\\nContent-Type: application/json\\r\\nContent-Length: %d\\r\\n\\r\\n"%len(BODY)+BODY)
    except Exception: w.close()
async def main():
    s=await asyncio.start_server(h,"127.0.0.1",0,limit=1<<22)
    print(s.sockets[0].getsockname()[1],flush=True)
    await s.serve_forever()
asyncio.run(main())
'''
procs=[]
def start(cmd,env=None,**k):
    p=subprocess.Popen(cmd,env={**os.environ,**(env or {})},stdin=subprocess.DEVNULL,**k); procs.append(p); return p
engs=[]
for _ in range(2):
    e=start([PY,'-c',ENGINE],stdout=subprocess.PIPE,stderr=subprocess.DEVNULL,text=True); engs.append(int(e.stdout.readline()))
def free():
    s=socket.socket(); s.bind(('127.0.0.1',0)); p=s.getsockname()[1]; s.close(); return p
arms={'engine':engs[0]}
serving={}
for tree in TREES:
    name=os.path.basename(tree.rstrip('/'))
    for kind in('proxy','round_robin','semantic_locality'):
        p=free(); arms[f'{kind} {name}']=p
        if kind=='proxy': a=['proxy','--upstream',f'http://127.0.0.1:{engs[0]}']
        else: a=['router','--replicas',','.join(f'http://127.0.0.1:{x}' for x in engs),'--policy',kind]
        serving[f'{kind} {name}']=start([PY,'-m','semantickv',*a,'--port',str(p)],env={'PYTHONPATH':tree+'/src','SEMANTICKV_TRACE':'0'},stdout=subprocess.DEVNULL,stderr=subprocess.STDOUT)
rng=random.Random(0)
docs=[" ".join(rng.choice(["river","stone","cloud","market"])+str(rng.randrange(99)) for _ in range(4500)) for _ in range(8)]
n=0
def ask(s):
    global n; n+=1
    b=json.dumps({"model":"m","prompt":docs[n%8]+"Q%d"%n,"max_tokens":16}).encode()
    m=b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nAuthorization: Bearer k\r\nContent-Length: %d\r\n\r\n"%len(b)+b
    t=time.perf_counter(); s.sendall(m); d=b""
    while b"\r\n\r\n" not in d:
        x=s.recv(65536); assert x,d; d+=x
    h,_,rest=d.partition(b"\r\n\r\n"); L=[int(l[15:]) for l in h.lower().split(b"\r\n") if l.startswith(b"content-length:")][0]
    while len(rest)<L: rest+=s.recv(65536)
    assert b" 200 " in h[:20],d
    return (time.perf_counter()-t)*1e3
def ticks():
    v=[int(x) for x in open('/proc/stat').readline().split()[1:9]]; return sum(v),v[3]+v[4]
def idle_since(t):
    u=ticks(); return (u[1]-t[1])/max(1,u[0]-t[0])
def cpu_ms(k):
    v=open(f'/proc/{serving[k].pid}/stat').read().rsplit(')',1)[1].split(); return (int(v[11])+int(v[12]))*1e3/os.sysconf('SC_CLK_TCK')
asked={}
def sample(k):
    while True:
        t=ticks(); time.sleep(.1*QUIET)
        if QUIET and idle_since(t)<.85: continue
        t=ticks(); m=st.median(ask(con[k]) for _ in range(20)); asked[k]=asked.get(k,0)+20
        if not QUIET or idle_since(t)>=.25: return m
con={}
end=time.time()+120
try:
    for k,p in arms.items():
        while True:
            try: s=socket.create_connection(('127.0.0.1',p)); s.setsockopt(6,1,1); s.settimeout(30); ask(s); con[k]=s; break
            except (OSError,AssertionError) as e:
                if time.time()>end: sys.exit(f'{k}: {e!r}')
                time.sleep(.5)
    for k in con:
        for _ in range(30): ask(con[k])
    rounds={k:[] for k in con}
    before={k:cpu_ms(k) for k in serving}
    for r in range(ROUNDS):
        order=list(con); rng.shuffle(order)
        for k in order: rounds[k].append(sample(k))
    base=rounds['engine']
    print('engine alone %.2f ms'%st.median(base))
    for k in con:
        if k!='engine':
            d=sorted(a-b for a,b in zip(rounds[k],base)); q=len(d)//4
            print(f'{k:28s} added median {st.median(d):.2f} ms, quartiles {d[q]:.2f} to {d[-1-q]:.2f}; CPU {(cpu_ms(k)-before[k])/asked[k]:.2f} ms')
finally:
    for p in procs: p.kill()
