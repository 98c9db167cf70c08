// Drives Chromium over a pipe: opens a page, and prints its text, the protocol it came by, and the answer to a POST.
// The proxy's user and password cannot stand in --proxy-server; they are given when Chromium asks (Fetch.authRequired).
// With a third argument, Chromium uses its own sandbox, and the number of networks in which pages run is printed, too.
// With NET_LOG, its log of connections is written there.
const { spawn } = require('child_process');
const fs = require('fs');

const [page, post, sandboxed] = process.argv.slice(2);
const proxy = new URL(process.env.HTTPS_PROXY);
const browser = spawn('chromium', [
  '--headless', ...(sandboxed ? [] : ['--no-sandbox']), '--disable-gpu', '--disable-quic', '--disable-dev-shm-usage', '--no-first-run',
  '--disable-background-networking', '--disable-component-update', '--disable-sync', '--disable-default-apps',
  `--user-data-dir=${process.cwd()}/profile`, `--proxy-server=${proxy.protocol === 'https:' ? 'https://' : ''}${proxy.host}`,
  ...(process.env.NET_LOG ? [`--log-net-log=${process.env.NET_LOG}`] : []), '--remote-debugging-pipe', 'about:blank',
], { stdio: ['ignore', 'ignore', 'ignore', 'pipe', 'pipe'], detached: true });
browser.on('error', error => end(error.message));
browser.on('exit', () => end('Chromium ended'));

let last = 0;
const waiting = new Map();
const heard = new Map();

function send(method, params = {}, sessionId) {
  return new Promise((resolve, reject) => {
    waiting.set(++last, { resolve, reject });
    browser.stdio[3].write(JSON.stringify({ id: last, method, params, sessionId }) + '\0');
  });
}

function end(problem) {
  browser.removeAllListeners();
  // Its whole group, which is its own: it starts many.
  if (browser.exitCode === null && browser.pid) process.kill(-browser.pid, 'SIGKILL');
  if (problem) console.error(problem);
  process.exitCode = problem ? 1 : 0;
  browser.stdio.forEach(pipe => pipe?.destroy());
}

let rest = '';
browser.stdio[4].setEncoding('utf8').on('data', text => {
  const messages = (rest + text).split('\0');
  rest = messages.pop();
  for (const message of messages.map(JSON.parse)) {
    if (message.id) {
      const { resolve, reject } = waiting.get(message.id);
      message.error ? reject(new Error(message.error.message)) : resolve(message.result);
    } else {
      heard.get(message.method)?.(message.params);
    }
  }
});

async function drive() {
  const { targetId } = await send('Target.createTarget', { url: 'about:blank' });
  const { sessionId } = await send('Target.attachToTarget', { targetId, flatten: true });
  const tell = (method, params) => send(method, params, sessionId);
  heard.set('Fetch.requestPaused', ({ requestId }) => tell('Fetch.continueRequest', { requestId }));
  heard.set('Fetch.authRequired', ({ requestId, authChallenge }) => {
    // Only for the proxy: origins shall not get it.
    const ours = authChallenge.source === 'Proxy';
    const [username, password] = [proxy.username, proxy.password].map(decodeURIComponent);
    const authChallengeResponse = ours ? { response: 'ProvideCredentials', username, password } : { response: 'CancelAuth' };
    tell('Fetch.continueWithAuth', { requestId, authChallengeResponse });
  });
  await tell('Fetch.enable', { handleAuthRequests: true });
  await tell('Page.enable');
  const loaded = new Promise(resolve => heard.set('Page.loadEventFired', resolve));
  const { errorText } = await tell('Page.navigate', { url: page });
  if (errorText) throw new Error(errorText);
  await loaded;
  const expression = `(async () => [
    document.body.innerText.trim(),
    performance.getEntriesByType('navigation')[0].nextHopProtocol,
    await (await fetch(${JSON.stringify(post)}, { method: 'POST', body: 'x'.repeat(100000) })).text(),
  ].join(' '))()`;
  const { result, exceptionDetails } = await tell('Runtime.evaluate', { expression, awaitPromise: true });
  if (exceptionDetails) throw new Error(JSON.stringify(exceptionDetails));
  console.log(sandboxed ? `${result.value} ${otherNetworks()}` : result.value);
}

// The number of network namespaces, apart from that of this process, in which there are renderers.
function otherNetworks() {
  const network = pid => fs.readlinkSync(`/proc/${pid}/ns/net`);
  const isRenderer = pid => fs.readFileSync(`/proc/${pid}/cmdline`, 'utf8').includes('--type=renderer');
  const renderers = fs.readdirSync('/proc').filter(name => /^\d+$/.test(name)).filter(isRenderer);
  return new Set(renderers.map(network).filter(it => it !== network('self'))).size;
}

drive().then(() => end(), error => end(error.message));
