'use strict';
// All texts of the log come from sandboxes. They become text nodes, never markup.

const byId = id => document.getElementById(id);

// Times between two fetches, in milliseconds. An answer that takes long makes the next one wait longer.
const DECISIONS_EVERY = 1000;
const NUMBERS_EVERY = 2000;
const EXECUTIONS_EVERY = 4000;
const MAX_ROWS = 200;
const MAX_EXECUTIONS = 100;
const MAX_APPROVALS = 50;
const RATE_SECONDS = 120;

let token = '';
let next = 0;
let skippedBefore = null;
let lines = [];
let numbersBefore = null;
let rates = [];
const approvalsShown = new Map();

function node(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key === 'class') made.className = value;
    else if (key.startsWith('aria-')) made.setAttribute(key, value);
    else made[key] = value;
  }
  made.append(...children.filter(child => child !== null && child !== undefined));
  return made;
}

function shape(name, attributes) {
  const made = document.createElementNS('http' + '://www.w3.org/2000/svg', name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

// Marks what could change the order of a text or is not visible.
function clean(text) {
  return String(text ?? '').replace(/[\u0000-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, '\ufffd');
}

async function ask(path, body, method) {
  const headers = { Authorization: `Bearer ${token}` };
  const answer = await fetch(path, {
    method: method ?? (body === undefined ? 'GET' : 'POST'),
    headers, cache: 'no-store', credentials: 'omit',
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  if (answer.status === 401) throw new Error('the token is not valid');
  if (!answer.ok && answer.status !== 409 && answer.status !== 422) throw new Error(clean((await answer.text()).slice(0, 300)) || `status ${answer.status}`);
  return answer;
}

// Runs a step again and again. Its problem is shown until it succeeds.
const problems = new Map();
async function repeat(name, every, step) {
  for (;;) {
    const began = performance.now();
    try {
      await step();
      problems.delete(name);
    } catch (problem) {
      problems.set(name, problem.message);
    }
    const worst = [...problems.values()][0];
    byId('problem').textContent = worst ? `Not up to date: ${worst}` : '';
    byId('problem').className = worst ? 'bad' : '';
    if (worst) state('bad', 'not up to date');
    const took = performance.now() - began;
    const wait = document.hidden ? every * 5 : every;
    await new Promise(done => setTimeout(done, Math.max(wait, took * 10)));
  }
}

function state(kind, text) {
  byId('state').className = `state ${kind}`;
  byId('state').textContent = text;
}

// ---- numbers, from the metrics ----

function parseMetrics(text) {
  const found = [];
  for (const line of text.split('\n')) {
    const parts = /^([a-z0-9_]+)(?:\{(.*)\})? ([^ ]+)/.exec(line);
    if (!parts || line.startsWith('#')) continue;
    const labels = {};
    for (const [, key, value] of (parts[2] ?? '').matchAll(/([a-z_]+)="((?:[^"\\]|\\.)*)"/g)) {
      labels[key] = value.replace(/\\(.)/g, (_, c) => (c === 'n' ? '\n' : c));
    }
    found.push({ name: parts[1], labels, value: Number(parts[3]) });
  }
  return found;
}

function summary(metrics) {
  const sums = { allow: 0, deny: 0, fail: 0, abandoned: 0 };
  const reasons = new Map();
  const hosts = [];
  const buckets = [];
  const gauges = {};
  for (const { name, labels, value } of metrics) {
    if (name === 'exeat_requests_total') {
      sums[labels.verdict] = (sums[labels.verdict] ?? 0) + value;
      if (labels.code && value > 0) {
        const known = reasons.get(labels.code) ?? { count: 0, stage: labels.stage };
        known.count += value;
        reasons.set(labels.code, known);
      }
    } else if (name === 'exeat_top_host_requests') {
      hosts.push([labels.host, value]);
    } else if (name === 'exeat_request_duration_seconds_bucket' && labels.kind === 'request') {
      buckets.push([labels.le === '+Inf' ? Infinity : Number(labels.le), value]);
    } else if (Object.keys(labels).length === 0) {
      gauges[name] = value;
    }
  }
  buckets.sort((a, b) => a[0] - b[0]);
  hosts.sort((a, b) => b[1] - a[1]);
  return { sums, reasons, hosts, buckets, gauges, at: performance.now() };
}

function number(value) {
  return value >= 1e6 ? `${(value / 1e6).toFixed(1)} M` : value >= 1e4 ? `${(value / 1e3).toFixed(1)} k` : String(Math.round(value));
}

function tile(name, value, kind) {
  return node('div', { class: 'tile' }, node('b', { class: kind ?? '', textContent: value }), node('span', { class: 'quiet', textContent: name }));
}

function duration(seconds) {
  if (!Number.isFinite(seconds)) return 'more';
  return seconds < 0.001 ? `${Math.round(seconds * 1e6)} \u00b5s` : seconds < 1 ? `${Number((seconds * 1e3).toPrecision(2))} ms` : `${Number(seconds.toPrecision(2))} s`;
}

// The upper bound of the bucket that holds a part of all requests.
function percentile(buckets, part) {
  const total = buckets.at(-1)?.[1] ?? 0;
  return total === 0 ? null : buckets.find(([, count]) => count >= total * part)[0];
}

function showNumbers(now) {
  const { sums, reasons, hosts, buckets, gauges } = now;
  const p = part => { const at = percentile(buckets, part); return at === null ? '\u2013' : `\u2264 ${duration(at)}`; };
  byId('tiles').replaceChildren(
    tile('allowed', number(sums.allow), 'good'), tile('refused', number(sums.deny), sums.deny ? 'bad' : ''),
    tile('failed', number(sums.fail), sums.fail ? 'warn' : ''), tile('in progress', number(gauges.exeat_exchanges ?? 0)),
    tile('connections', number(gauges.exeat_connections ?? 0)), tile('median', p(0.5)), tile('95th percentile', p(0.95)),
  );
  if (numbersBefore) {
    const seconds = (now.at - numbersBefore.at) / 1000;
    const per = key => Math.max(0, ((sums[key] ?? 0) - (numbersBefore.sums[key] ?? 0)) / seconds);
    rates.push({ allowed: per('allow') + per('abandoned'), refused: per('deny') + per('fail') });
    rates = rates.slice(-Math.ceil(RATE_SECONDS * 1000 / NUMBERS_EVERY));
  }
  numbersBefore = now;
  showRates();
  showLatency(buckets);
  const sorted = [...reasons].sort((a, b) => b[1].count - a[1].count).slice(0, 12);
  byId('reasons').replaceChildren(...sorted.map(([code, { count, stage }]) => node('tr', {},
    node('td', { textContent: clean(code) }), node('td', { class: 'quiet', textContent: clean(stage) }), node('td', { class: 'number', textContent: number(count) }))));
  byId('reasons-none').hidden = sorted.length > 0;
  byId('hosts').replaceChildren(...hosts.slice(0, 12).map(([host, count]) => node('tr', {},
    node('td', { textContent: clean(host) }), node('td', { class: 'number', textContent: number(count) }))));
  byId('hosts-none').hidden = hosts.length > 0;
}

function showRates() {
  const plot = byId('rate');
  const slots = Math.ceil(RATE_SECONDS * 1000 / NUMBERS_EVERY);
  const most = Math.max(1, ...rates.map(({ allowed, refused }) => allowed + refused));
  const width = 480 / slots;
  const shapes = [shape('line', { x1: 0, y1: 119.5, x2: 480, y2: 119.5 })];
  rates.forEach(({ allowed, refused }, at) => {
    const x = (slots - rates.length + at) * width;
    const [good, bad] = [allowed, refused].map(value => (value / most) * 112);
    shapes.push(shape('rect', { class: 'allowed', x, y: 119 - good, width: width * 0.8, height: good }));
    shapes.push(shape('rect', { class: 'refused', x, y: 119 - good - bad, width: width * 0.8, height: bad }));
  });
  plot.replaceChildren(...shapes);
  const last = rates.at(-1);
  const text = last ? `now ${last.allowed.toFixed(1)} allowed and ${last.refused.toFixed(1)} refused or failed; most in ${RATE_SECONDS / 60} minutes: ${most.toFixed(1)}` : 'a moment, please';
  plot.setAttribute('aria-label', text);
  byId('rate-note').textContent = text;
}

function showLatency(buckets) {
  const counts = buckets.map(([at, count], index) => [at, count - (buckets[index - 1]?.[1] ?? 0)]);
  const first = counts.findIndex(([, count]) => count > 0);
  const last = counts.findLastIndex(([, count]) => count > 0);
  const shown = first < 0 ? [] : counts.slice(first, last + 1);
  const most = Math.max(1, ...shown.map(([, count]) => count));
  const width = Math.min(60, 480 / Math.max(1, shown.length));
  byId('latency').replaceChildren(shape('line', { x1: 0, y1: 119.5, x2: 480, y2: 119.5 }), ...shown.map(([at, count], index) => {
    const height = (count / most) * 112;
    const bar = shape('rect', { class: 'bar', x: index * width, y: 119 - height, width: width * 0.85, height });
    const title = shape('title', {});
    title.textContent = `up to ${duration(at)}: ${count}`;
    bar.append(title);
    return bar;
  }));
  const text = shown.length === 0 ? 'no requests yet'
    : `from up to ${duration(shown[0][0])} on the left to up to ${duration(shown.at(-1)[0])} on the right, since the start`;
  byId('latency').setAttribute('aria-label', text);
  byId('latency-note').textContent = text;
}

// ---- decisions ----

function result(line) {
  if (line.verdict === 'counted') return ['warn', `${line.count} counted`];
  if (line.verdict === 'deny') return ['bad', line.code];
  if (line.verdict === 'fail') return ['warn', line.code];
  if (line.verdict === 'abandoned') return ['quiet', 'abandoned'];
  if (line.event === 'decided') return ['good', 'in progress'];
  return ['good', line.response_status ?? 'allowed'];
}

function place(line) {
  const isDefault = line.port === (line.scheme === 'http' ? 80 : 443);
  return line.host === undefined ? '' : `${line.scheme}://${line.host}${isDefault ? '' : `:${line.port}`}`;
}

function url(line) {
  const path = line.path ?? '';
  return place(line) + (path === '' || path.startsWith('/') ? path : `/${path}`);
}

function add(newLines) {
  for (const line of newLines) {
    const known = lines.findIndex(other => other.id === line.id);
    if (known >= 0) lines[known] = line;
    else lines.unshift(line);
  }
  lines.length = Math.min(lines.length, MAX_ROWS);
}

function showDecisions() {
  const wanted = byId('filter').value.toLowerCase();
  const onlyRefused = byId('only-refused').checked;
  const shown = lines.filter(line => (!onlyRefused || line.verdict === 'deny' || line.verdict === 'fail')
    && (!wanted || [line.task, url(line), line.code, line.tool, line.method].some(text => String(text ?? '').toLowerCase().includes(wanted))));
  const focused = document.activeElement?.dataset?.line;
  byId('decisions').replaceChildren(...shown.map(line => {
    const [kind, text] = result(line);
    const words = `${line.tool ? `${line.tool} ` : ''}${line.method ?? ''} ${url(line)}`;
    const open = node('button', { class: 'link', type: 'button', textContent: clean(words) || 'unreadable request' });
    open.dataset.line = line.id;
    open.addEventListener('click', () => showDetail(line));
    return node('tr', {},
      node('td', { textContent: clean(line.ts).slice(11, 19) }), node('td', { textContent: clean(line.task) }), node('td', {}, open),
      node('td', { class: kind, textContent: clean(text) }),
      node('td', { class: 'number', textContent: line.latency_ms === undefined ? '' : line.latency_ms.toFixed(1) }));
  }));
  if (focused) byId('decisions').querySelector(`[data-line="${CSS.escape(focused)}"]`)?.focus();
  byId('decisions-none').hidden = shown.length > 0;
  byId('decisions-none').textContent = lines.length > 0 ? 'nothing that matches' : 'nothing yet';
}

function facts(list, pairs) {
  list.replaceChildren(...pairs.filter(([, value]) => value !== undefined && value !== null && value !== '')
    .flatMap(([name, value]) => [node('dt', { textContent: name }), node('dd', { textContent: clean(value) })]));
}

async function showDetail(line) {
  const refused = line.verdict === 'deny' || line.verdict === 'fail';
  byId('detail-title').textContent = clean(refused ? line.code : `${line.method ?? ''} ${line.host ?? ''}`);
  facts(byId('detail-facts'), [
    ['request', `${line.method ?? ''} ${url(line)}`], ['task', line.task], ['execution', line.execution], ['tool', line.tool],
    ['client', line.peer], ['stage', line.stage], ['rule', line.rule], ['status', line.response_status],
    ['credential', line.credential_used], ['address', line.addr], ['sent', line.request_bytes && `${line.request_bytes} bytes`],
    ['received', line.response_size_bytes && `${line.response_size_bytes} bytes`], ['redacted', line.redacted],
    ['alarm', line.alarm], ['time', line.ts], ['id', line.id],
  ]);
  const remedy = byId('detail-remedy');
  remedy.replaceChildren();
  byId('detail').showModal();
  if (!refused || !line.task || !line.host || !line.method) return;
  try {
    const asked = { task: line.task, method: line.method, url: url(line) };
    if (line.tool) asked.tool = line.tool;
    const answer = await ask('/v1/explain', asked);
    const said = await answer.json();
    const now = !answer.ok ? said.error : said.allowed ? `The policy in force allows it now, by ${said.rule}.`
      : said.code === line.code ? said.hint : `The policy in force would refuse it with ${said.code}: ${said.hint}`;
    remedy.append(node('p', { textContent: clean(now) }));
    if (said.remedy) {
      remedy.append(node('p', { class: 'quiet', textContent: clean(`${said.remedy.reason} (${said.remedy.key})`) }));
      if (said.remedy.toml) {
        remedy.append(node('p', { textContent: 'This in the configuration would lead past this refusal. Nothing is changed by this page.' }),
          node('pre', { tabIndex: 0, textContent: said.remedy.toml.split('\n').map(clean).join('\n') }));
      } else {
        remedy.append(node('p', { textContent: 'No key of the configuration would allow it.' }));
      }
    }
  } catch (problem) {
    remedy.append(node('p', { class: 'bad', textContent: clean(problem.message) }));
  }
}

// ---- approvals ----

function left(until) {
  const seconds = Math.max(0, Math.round((Date.parse(until) - Date.now()) / 1000));
  return seconds < 120 ? `${seconds} s` : seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
}

function approvalCard(approval) {
  const { id, bound } = approval;
  const list = node('dl');
  facts(list, [
    ['task', approval.task], ['execution', approval.execution], ['tool', approval.tool], ['query', bound?.query],
    ['credential', bound ? (bound.credential ? `${bound.credential.name} in ${bound.credential.places.join(', ')}` : 'none') : null],
    ['body', bound ? (bound.body.bytes === 0 ? 'empty' : `${bound.body.bytes} bytes, sha256 ${bound.body.sha256}`) : null],
    ['digest of all parts', bound?.digest], ['id', id],
  ]);
  const answer = node('p', { role: 'status' });
  const buttons = [['Approve once', 'approve', 'primary'], ['Deny', 'deny', 'danger']].map(([text, decision, kind]) => {
    const button = node('button', { class: kind, type: 'button', textContent: text, 'aria-label': `${text}: ${clean(approval.method)} ${clean(approval.url)}` });
    button.addEventListener('click', async () => {
      buttons.forEach(other => { other.disabled = true; });
      try {
        const reply = await ask(`/v1/approvals/${encodeURIComponent(id)}`, { decision });
        const said = await reply.json();
        answer.textContent = reply.ok ? `${said.state}; the client sends the request again` : clean(`${said.error} (${said.state ?? ''})`);
      } catch (problem) {
        answer.textContent = clean(problem.message);
        answer.className = 'bad';
        buttons.forEach(other => { other.disabled = false; });
      }
    });
    return button;
  });
  const fields = bound?.fields.map(([name, value]) => `${clean(name)}: ${clean(value)}`) ?? [];
  const trailers = bound?.trailers.map(([name, value]) => `${clean(name)}: ${clean(value)} (trailer)`) ?? [];
  const more = bound?.more_fields ? ['(and more)'] : [];
  const body = bound?.body.text;
  return node('div', { class: 'approval' },
    node('h3', { textContent: clean(`${approval.method} ${approval.url}`) }),
    node('p', { class: 'quiet expiry', textContent: '' }), list,
    bound ? null : node('p', { class: 'warn', textContent: 'The rest of the request is not known here: another proxy was asked, or this one has started anew since. The decision is for exactly the request that was made.' }),
    bound ? node('pre', { tabIndex: 0, textContent: [...fields, ...trailers, ...more].join('\n') || 'no header fields', 'aria-label': 'Header fields' }) : null,
    body ? node('pre', { tabIndex: 0, textContent: body.split('\n').map(clean).join('\n') + (bound.body.is_whole ? '' : '\n\u2026'), 'aria-label': 'Body' }) : null,
    bound && bound.body.bytes > 0 && body === null ? node('p', { class: 'warn', textContent: 'The body is not text.' }) : null,
    node('div', { class: 'buttons' }, ...buttons), answer);
}

async function fetchApprovals() {
  const pending = (await (await ask('/v1/approvals?state=pending')).json()).slice(0, MAX_APPROVALS);
  const ids = new Set(pending.map(({ id }) => id));
  for (const [id, card] of approvalsShown) {
    if (ids.has(id)) continue;
    approvalsShown.delete(id);
    // What was decided here stays for a moment, with its answer.
    setTimeout(() => { card.remove(); byId('approvals').hidden = byId('approval-list').children.length === 0; }, 3000);
  }
  for (const { id, expires_at } of pending) {
    if (!approvalsShown.has(id)) {
      const answer = await ask(`/v1/approvals/${encodeURIComponent(id)}`);
      const card = approvalCard(await answer.json());
      approvalsShown.set(id, card);
      byId('approval-list').append(card);
    }
    approvalsShown.get(id).querySelector('.expiry').textContent = `expires in ${left(expires_at)}`;
  }
  byId('approvals').hidden = byId('approval-list').children.length === 0;
  document.title = pending.length > 0 ? `(${pending.length}) exeat` : 'exeat';
}

// ---- executions ----

function budget(counts) {
  const { calls, calls_in_window: inWindow, limits } = counts;
  const whole = limits.calls_per_execution === null ? `${calls}` : `${calls} of ${limits.calls_per_execution}`;
  return limits.calls_per_minute === null ? whole : `${whole}; ${inWindow} of ${limits.calls_per_minute} this minute`;
}

async function fetchExecutions() {
  const all = await (await ask('/v1/executions')).json();
  const running = all.filter(({ stopped }) => stopped === null);
  const shown = [...running.reverse(), ...all.filter(({ stopped }) => stopped !== null).reverse()].slice(0, MAX_EXECUTIONS);
  if (byId('executions').contains(document.activeElement)) return;
  byId('executions').replaceChildren(...shown.map(execution => {
    const { id, task, stopped, expires_at: expires, finds, credits } = execution;
    const text = stopped ? `stopped: ${stopped}` : `${expires === null ? 'running' : `ends in ${left(expires)}`}${finds > 0 ? `; ${finds} finds` : ''}`;
    const stop = node('button', { class: 'danger', type: 'button', textContent: 'Stop', 'aria-label': `Stop ${clean(id)}` });
    stop.addEventListener('click', async () => {
      if (stop.textContent === 'Stop') {
        stop.textContent = 'Really stop';
        setTimeout(() => { if (!stop.disabled) stop.textContent = 'Stop'; }, 4000);
        return;
      }
      stop.disabled = true;
      try {
        await ask(`/v1/executions/${encodeURIComponent(id)}`, undefined, 'DELETE');
        stop.textContent = 'Stopped';
      } catch (problem) {
        stop.textContent = 'Failed';
        stop.title = problem.message;
      }
      stop.blur();
    });
    return node('tr', {}, node('td', { textContent: clean(id) }), node('td', { textContent: clean(task) }),
      node('td', { textContent: budget(execution) }), node('td', { textContent: budget(execution.raw) }),
      node('td', { class: 'number', textContent: credits }), node('td', { class: stopped ? 'bad' : '', textContent: clean(text) }),
      node('td', {}, stopped ? '' : stop));
  }));
  byId('executions-note').textContent = all.length > shown.length ? `${shown.length} of ${all.length}` : all.length === 0 ? 'none' : '';
}

// ---- the rest ----

async function fetchNumbers() {
  showNumbers(summary(parseMetrics(await (await ask('/metrics')).text())));
  const { version, ready, reason } = await (await ask('/v1/status')).json();
  byId('version').textContent = clean(version);
  if (problems.size === 0) state(ready ? 'good' : 'bad', ready ? 'ready' : clean(reason));
}

async function fetchDecisions() {
  if (byId('paused').checked) return;
  const { lines: newLines, next: following, skipped } = await (await ask(`/v1/decisions?after=${next}`)).json();
  const more = skippedBefore === null || following < next ? 0 : skipped - skippedBefore;
  [next, skippedBefore] = [following, skipped];
  byId('sampled').textContent = more > 0 ? `sampled: ${number(more)} of the last second are not shown` : '';
  if (newLines.length === 0) return;
  add(newLines);
  showDecisions();
}

async function connect(given) {
  token = given.trim();
  byId('login-problem').textContent = '';
  try {
    await fetchNumbers();
  } catch (problem) {
    byId('login-problem').textContent = clean(problem.message);
    byId('login-problem').className = 'bad';
    return;
  }
  byId('token').value = '';
  byId('login').hidden = true;
  byId('live').hidden = false;
  repeat('numbers', NUMBERS_EVERY, fetchNumbers);
  repeat('decisions', DECISIONS_EVERY, fetchDecisions);
  repeat('approvals', NUMBERS_EVERY, fetchApprovals);
  repeat('executions', EXECUTIONS_EVERY, fetchExecutions);
}

byId('login').addEventListener('submit', event => {
  event.preventDefault();
  connect(byId('token').value);
});
byId('filter').addEventListener('input', showDecisions);
byId('only-refused').addEventListener('change', showDecisions);

if (location.hash.length > 1) {
  const given = decodeURIComponent(location.hash.slice(1));
  // Not in the history, and not on the screen.
  history.replaceState(null, '', location.pathname);
  connect(given);
} else {
  byId('token').focus();
}
