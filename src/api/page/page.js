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
  return String(text ?? '').replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Default_Ignorable_Code_Point}]/gu, '\ufffd');
}

// The same for a text of several lines, in which tabs and ends of lines are usual.
function cleanLines(text) {
  return String(text ?? '').replaceAll('\r\n', '\n').split('\n').map(line => line.split('\t').map(clean).join('\t')).join('\n');
}

async function ask(path, body, method) {
  const headers = { Authorization: `Bearer ${token}` };
  const answer = await fetch(path, {
    method: method ?? (body === undefined ? 'GET' : 'POST'),
    headers, cache: 'no-store', credentials: 'omit', signal: AbortSignal.timeout(15000),
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
  return { sums, reasons, hosts, buckets, gauges };
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
    tile('failed', number(sums.fail), sums.fail ? 'warn' : ''), tile('abandoned', number(sums.abandoned)), tile('in progress', number(gauges.exeat_exchanges ?? 0)),
    tile('connections', number(gauges.exeat_connections ?? 0)), tile('median', p(0.5)), tile('95th percentile', p(0.95)),
  );
  if (numbersBefore) {
    const seconds = (now.at - numbersBefore.at) / 1000;
    const per = key => Math.max(0, ((sums[key] ?? 0) - (numbersBefore.sums[key] ?? 0)) / seconds);
    rates.push({ from: numbersBefore.at, to: now.at, allowed: per('allow'), refused: per('deny') + per('fail') });
    rates = rates.filter(({ to }) => to > now.at - RATE_SECONDS * 1000);
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
  const end = rates.at(-1)?.to ?? 0;
  const position = at => 480 * (1 - (end - at) / (RATE_SECONDS * 1000));
  const most = Math.max(1, ...rates.map(({ allowed, refused }) => allowed + refused));
  const shapes = [shape('line', { x1: 0, y1: 119.5, x2: 480, y2: 119.5 })];
  rates.forEach(({ from, to, allowed, refused }) => {
    const x = Math.max(0, position(from));
    const width = position(to) - x;
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

const isRefused = line => line.verdict === 'deny' || line.verdict === 'fail';

// Others do not push refusals out.
function add(newLines) {
  for (const line of newLines) {
    const known = lines.findIndex(other => other.id === line.id);
    if (known >= 0) lines[known] = line;
    else lines.unshift(line);
  }
  const kept = [0, 0];
  lines = lines.filter(line => (kept[isRefused(line) ? 0 : 1] += 1) <= MAX_ROWS);
}

function showDecisions() {
  const wanted = byId('filter').value.toLowerCase();
  const onlyRefused = byId('only-refused').checked;
  const shown = lines.filter(line => (!onlyRefused || isRefused(line))
    && (!wanted || [line.task, url(line), line.code, line.tool, line.method].some(text => String(text ?? '').toLowerCase().includes(wanted)))).slice(0, MAX_ROWS);
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

let detailNumber = 0;
async function showDetail(line) {
  const refused = isRefused(line);
  const own = detailNumber += 1;
  byId('detail-title').textContent = clean(refused ? line.code : `${line.method ?? ''} ${line.host ?? ''}`);
  facts(byId('detail-facts'), [
    ['request', `${line.method ?? ''} ${url(line)}`], ['task', line.task], ['execution', line.execution], ['tool', line.tool],
    ['client', line.peer], ['stage', line.stage], ['rule', line.rule], ['status', line.response_status],
    ['credential', line.credential_used && [line.credential_used, ...(line.credentials_beside ?? [])].join(', ')], ['address', line.addr], ['sent', line.request_bytes && `${line.request_bytes} bytes`],
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
    // Another request may have been opened meanwhile.
    if (own !== detailNumber) return;
    const now = !answer.ok ? said.error : said.allowed ? `The policy in force allows it now, by ${said.rule}.`
      : said.code === line.code ? said.hint : `The policy in force would refuse it with ${said.code}: ${said.hint}`;
    remedy.append(node('p', { textContent: clean(now) }));
    if (said.remedy) {
      remedy.append(node('p', { class: 'quiet', textContent: clean(`${said.remedy.reason} (${said.remedy.key})`) }));
      if (said.remedy.toml) {
        remedy.append(node('p', { textContent: 'This in the configuration would lead past this refusal. Nothing is changed by this page.' }),
          node('pre', { tabIndex: 0, textContent: cleanLines(said.remedy.toml) }));
      } else {
        remedy.append(node('p', { textContent: 'No key of the configuration would allow it.' }));
      }
    }
  } catch (problem) {
    if (own !== detailNumber) return;
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
  const isCommand = approval.tool === 'dangerous_shell';
  const list = node('dl');
  facts(list, [
    ['task', approval.task], ['execution', approval.execution], ['tool', approval.tool], ['query', bound?.query],
    ['credentials', bound && !isCommand ? (bound.credentials.map(({ name, places }) => `${name} in ${places.join(', ')}`).join('; ') || 'none') : null],
    [isCommand ? 'command' : 'body', bound ? (bound.body.bytes === 0 ? 'empty' : `${bound.body.bytes} bytes, sha256 ${bound.body.sha256}`) : null],
    ['digest of all parts', bound?.digest], ['id', id],
  ]);
  const answer = node('p', { role: 'status' });
  const buttons = [['Approve once', 'approve', 'primary'], ['Deny', 'deny', 'danger']].map(([text, decision, kind]) => {
    const button = node('button', { class: kind, type: 'button', textContent: text, 'aria-label': `${text}: ${clean(approval.method)} ${clean(approval.url)}` });
    button.addEventListener('click', async () => {
      // What cannot be seen whole is approved by two clicks.
      if (decision === 'approve' && bound?.is_complete !== true && button.textContent === text) {
        button.textContent = 'Approve once, although not all of it is shown';
        return;
      }
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
  const body = bound?.body.text;
  return node('div', { class: 'approval' },
    node('h3', { textContent: clean(`${approval.method} ${approval.url}`) }),
    node('p', { class: 'quiet expiry', textContent: '' }), list,
    bound ? null : node('p', { class: 'warn', textContent: 'The rest of the request is not known here: another proxy was asked, this one has started anew since, or too many approvals were asked for. The decision is for exactly the request that was made.' }),
    bound && !bound.is_complete ? node('p', { class: 'warn', textContent: 'A part of the request is masked, hashed, too long to be shown, invisible, or not text.' }) : null,
    isCommand ? node('p', { class: 'quiet', textContent: 'A shell runs this in the workspace. The files that it runs or reads can change until then.' }) : null,
    bound ? node('pre', { tabIndex: 0, textContent: [...fields, ...trailers].join('\n') || 'no header fields', 'aria-label': isCommand ? 'Conditions' : 'Header fields' }) : null,
    isCommand && body ? node('ol', { class: 'lines', 'aria-label': 'Command' }, ...cleanLines(body).split('\n').map(line => node('li', { textContent: line }))) : null,
    body && !isCommand ? node('pre', { tabIndex: 0, textContent: cleanLines(body) + (bound.body.is_whole ? '' : '\n\u2026'), 'aria-label': 'Body' }) : null,
    bound && bound.body.bytes > 0 && body === null ? node('p', { class: 'warn', textContent: 'The body is not text.' }) : null,
    node('div', { class: 'buttons' }, ...buttons), answer);
}

// Takes some of all executions, so that one that asks for many does not hide the others.
function inTurns(approvals) {
  const rounds = new Map();
  const numbered = approvals.map(approval => {
    const round = (rounds.get(approval.execution) ?? 0) + 1;
    rounds.set(approval.execution, round);
    return { round, approval };
  });
  return numbered.sort((a, b) => a.round - b.round).map(({ approval }) => approval);
}

// Cards go away only while nobody is about to click on one below them.
function removeEnded() {
  const section = byId('approvals');
  if (!section.matches(':hover') && !section.contains(document.activeElement)) section.querySelectorAll('.ended').forEach(card => card.remove());
  section.hidden = byId('approval-list').children.length === 0;
}

async function fetchApprovals() {
  const all = await (await ask('/v1/approvals?state=pending')).json();
  const pending = inTurns(all).slice(0, MAX_APPROVALS);
  const ids = new Set(pending.map(({ id }) => id));
  for (const [id, card] of approvalsShown) {
    if (ids.has(id)) continue;
    approvalsShown.delete(id);
    card.querySelectorAll('button').forEach(button => { button.disabled = true; });
    card.querySelector('.expiry').textContent = 'decided or expired';
    // Its answer stays for a moment.
    setTimeout(() => { card.classList.add('ended'); removeEnded(); }, 3000);
  }
  removeEnded();
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
  byId('approvals-more').textContent = all.length > pending.length ? `${all.length - pending.length} more wait behind these.` : '';
  document.title = all.length > 0 ? `(${all.length}) exeat` : 'exeat';
}

// ---- executions ----

function budget(counts) {
  const { calls, calls_in_window: inWindow, limits } = counts;
  const whole = limits.calls_per_execution === null ? `${calls}` : `${calls} of ${limits.calls_per_execution}`;
  return limits.calls_per_minute === null ? whole : `${whole}; ${inWindow} of ${limits.calls_per_minute} this minute`;
}

const executionRows = new Map();
function executionRow(id) {
  const cells = Array.from({ length: 6 }, () => node('td'));
  cells[4].className = 'number';
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
      stop.textContent = 'Stop';
      stop.disabled = false;
      cells[5].textContent = clean(`not stopped: ${problem.message}`);
    }
  });
  return { row: node('tr', {}, ...cells, node('td', {}, stop)), cells, stop };
}

async function fetchExecutions() {
  const all = await (await ask('/v1/executions')).json();
  const wanted = byId('execution-filter').value.toLowerCase();
  const matching = all.filter(({ id, task }) => !wanted || id.toLowerCase().includes(wanted) || task.toLowerCase().includes(wanted));
  const running = matching.filter(({ stopped }) => stopped === null).reverse();
  const shown = [...running, ...matching.filter(({ stopped }) => stopped !== null).reverse()].slice(0, MAX_EXECUTIONS);
  const body = byId('executions');
  const ids = new Set(shown.map(({ id }) => id));
  for (const [id, { row }] of executionRows) {
    if (!ids.has(id)) {
      row.remove();
      executionRows.delete(id);
    }
  }
  shown.forEach((execution, at) => {
    const { id, task, stopped, expires_at: expires, finds, credits } = execution;
    if (!executionRows.has(id)) executionRows.set(id, executionRow(id));
    const { row, cells, stop } = executionRows.get(id);
    const state = stopped ? `stopped: ${stopped}` : `${expires === null ? 'running' : `ends in ${left(expires)}`}${finds > 0 ? `; ${finds} finds` : ''}`;
    [id, task, budget(execution), budget(execution.raw), credits, state].forEach((text, n) => {
      if (cells[n].textContent !== clean(text)) cells[n].textContent = clean(text);
    });
    cells[5].className = stopped ? 'bad' : '';
    stop.hidden = stopped !== null;
    // A row that stays in its place keeps the focus.
    if (body.children[at] !== row) body.insertBefore(row, body.children[at] ?? null);
  });
  byId('executions-note').textContent = matching.length > shown.length ? `${shown.length} of ${matching.length}` : matching.length === 0 ? 'none' : '';
}

// ---- the rest ----

async function fetchNumbers() {
  // The numbers are those of about this time. The answer may be read much later, if the browser is busy.
  const at = performance.now();
  showNumbers({ ...summary(parseMetrics(await (await ask('/metrics')).text())), at });
  const { version, ready, reason } = await (await ask('/v1/status')).json();
  byId('version').textContent = clean(version);
  if (problems.size === 0) state(ready ? 'good' : 'bad', ready ? 'ready' : clean(reason));
}

let askedAt = null;
async function fetchDecisions() {
  const { lines: newLines, next: following, skipped } = await (await ask(`/v1/decisions?after=${next}`)).json();
  const more = skippedBefore === null || following < next ? 0 : skipped - skippedBefore;
  // The daemon keeps nothing for a page that has not asked for so long.
  const hasGap = askedAt !== null && performance.now() - askedAt > 14000;
  askedAt = performance.now();
  [next, skippedBefore] = [following, skipped];
  byId('sampled').textContent = hasGap ? 'This page was not active: some are missing.'
    : more > 0 ? `sampled: ${number(more)} since the last look are not shown` : '';
  add(newLines);
  // Rows do not move under a pointer.
  const isHeld = byId('paused').checked || byId('decisions').matches(':hover');
  byId('held').textContent = isHeld ? 'held' : '';
  if (!isHeld && (newLines.length > 0 || wasHeld)) showDecisions();
  wasHeld = isHeld;
}
let wasHeld = false;

let isConnecting = false;
async function connect(given) {
  if (isConnecting) return;
  isConnecting = true;
  token = given.trim();
  byId('login-problem').textContent = '';
  try {
    await fetchNumbers();
  } catch (problem) {
    byId('login-problem').textContent = clean(problem.message);
    byId('login-problem').className = 'bad';
    return;
  } finally {
    isConnecting = false;
  }
  isConnecting = true;
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
byId('execution-filter').addEventListener('input', () => fetchExecutions().catch(() => {}));

if (location.hash.length > 1) {
  const given = location.hash.slice(1);
  // Not in the history, and not on the screen.
  history.replaceState(null, '', location.pathname);
  // Tokens have no character that is escaped, unless somebody has escaped one.
  let decoded = given;
  try { decoded = decodeURIComponent(given); } catch { /* It is no escape. */ }
  connect(decoded);
} else {
  byId('token').focus();
}
