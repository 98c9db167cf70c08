// Drives the live page in Chromium, as an operator would. Arguments: the address of the admin listener, its token, the id of a
// pending approval, and a directory for pictures, or "-".
const { chromium } = require('playwright-core');

const [address, token, approval, pictures] = process.argv.slice(2);
const assert = require('assert');

async function picture(page, name, fullPage = false) {
  if (pictures !== '-') await page.screenshot({ path: `${pictures}/${name}.png`, fullPage });
}

// Everything that a sandbox could put into a line, if exeat let it.
const HOSTILE = '"><img src=x onerror="window.hacked=1"></script><script>window.hacked=2</script>\u202e';
const hostileLines = Array.from({ length: 40 }, (_, n) => ({
  ts: '2026-11-27T10:00:00.5Z', id: `hostile-${n}${HOSTILE}`, event: 'refused', task: HOSTILE, execution: HOSTILE, peer: HOSTILE,
  tool: HOSTILE, method: HOSTILE, scheme: 'https', host: HOSTILE, port: 443, path: `/${HOSTILE}`, verdict: 'deny', code: HOSTILE,
  stage: HOSTILE, rule: HOSTILE, latency_ms: 1.5,
}));

async function main() {
  const browser = await chromium.launch({ executablePath: '/usr/bin/chromium', args: ['--no-sandbox', '--disable-gpu', '--disable-dev-shm-usage'] });
  const context = await browser.newContext({ viewport: { width: 1280, height: 900 }, colorScheme: 'light' });
  const page = await context.newPage();
  const problems = [];
  page.on('pageerror', error => problems.push(`error: ${error.message}`));
  page.on('console', message => { if (message.type() === 'error') problems.push(`console: ${message.text()}`); });
  page.on('request', request => { if (!request.url().startsWith(`http://${address}/`)) problems.push(`elsewhere: ${request.url()}`); });

  // A wrong token is refused; the right one is typed, and is kept nowhere.
  await page.goto(`http://${address}/`);
  await page.getByLabel('Admin token').fill('wrong');
  await page.keyboard.press('Enter');
  await page.getByText('the token is not valid').waitFor();
  // The browser writes a refused fetch to its console.
  problems.length = 0;
  await page.getByLabel('Admin token').fill(token);
  await page.getByRole('button', { name: 'Connect' }).press('Enter');
  await page.getByText('Waiting for your decision').waitFor();
  await page.locator('#state.good').waitFor();
  const kept = await page.evaluate(() => [localStorage.length, sessionStorage.length, document.cookie, location.href, document.documentElement.outerHTML]);
  assert(!JSON.stringify(kept).includes(token), 'the token is in the page');

  // Everything that the approval is bound to is shown.
  const card = page.locator('.approval').filter({ hasText: approval });
  for (const text of ['POST https://api.test', 'page=2', 'x-note: for you', '{"to": "all"}', 'KEY in header:authorization', 'digest of all parts']) {
    await card.getByText(text).first().waitFor();
  }
  await page.locator('#decisions tr').first().waitFor();
  await page.waitForTimeout(4500);
  await picture(page, 'page-light', true);

  // By the keyboard: a refusal with its stage, its rule and the TOML that would lead past it.
  await page.getByLabel('only refused').check();
  const refusal = page.locator('#decisions button').filter({ hasText: 'new.test' }).first();
  await refusal.focus();
  await page.keyboard.press('Enter');
  await page.getByText('[integrations.new-test]').waitFor();
  await page.locator('#detail-facts').getByText('authorize').waitFor();
  await picture(page, 'page-refusal');
  await page.keyboard.press('Escape');
  await page.locator('#detail').waitFor({ state: 'hidden' });
  await page.getByLabel('Filter decisions').fill('no such host');
  await page.getByText('nothing that matches').waitFor();
  await page.getByLabel('Filter decisions').fill('');
  await page.getByLabel('only refused').uncheck();

  // A decision by a click.
  await card.getByRole('button', { name: /^Approve once/ }).click();
  await card.getByText('approved; the client sends the request again').waitFor();

  // An execution is stopped by two clicks.
  const row = page.locator('#executions tr').filter({ hasText: 'ends in' }).first();
  const id = await row.locator('td').first().textContent();
  await row.getByRole('button').click();
  await row.getByRole('button', { name: 'Stop' }).click();
  await page.locator('#executions tr').filter({ hasText: id }).getByText('stopped: asked').waitFor();

  // Hostile texts, and ten thousand lines a second: a sample is shown, and the page says so.
  let skipped = 0;
  let next = 1e6;
  await page.route('**/v1/decisions*', route => {
    skipped += 9800;
    next += 200;
    const more = Array.from({ length: 160 }, (_, n) => ({ ...hostileLines[0], id: `${next + n}`, host: `h${n}.test`, path: '/' }));
    route.fulfill({ json: { lines: [...more, ...hostileLines], next, skipped } });
  });
  await page.route('**/v1/approvals?state=pending', route => route.fulfill({
    json: ['x', 'y'].map(id => ({ id, execution: id, expires_at: '2099-01-01T00:00:00Z' })),
  }));
  const command = [...Array(40).keys()].map(n => `echo ${n} ${'-'.repeat(n * 10)} "><script>0</script>`).join('\n');
  await page.route('**/v1/approvals/y', route => route.fulfill({
    json: {
      id: 'y', task: 't', execution: 'y', tool: 'dangerous_shell', method: 'RUN', url: 'sandbox:work', expires_at: '2099-01-01T00:00:00Z',
      bound: {
        digest: 'd', code: 'c', query: null, is_complete: true, credentials: [], fields: [['network', 'none']],
        body: { bytes: command.length, sha256: 's', text: command, is_whole: true }, trailers: [],
      },
    },
  }));
  await page.route('**/v1/approvals/x', route => route.fulfill({
    json: {
      id: 'x', task: HOSTILE, execution: HOSTILE, tool: HOSTILE, method: HOSTILE, url: HOSTILE, expires_at: '2099-01-01T00:00:00Z',
      bound: {
        digest: HOSTILE, query: HOSTILE, is_complete: false, credentials: [{ name: HOSTILE, places: [HOSTILE] }], fields: [[HOSTILE, HOSTILE]],
        body: { bytes: 5, sha256: HOSTILE, text: HOSTILE, is_whole: false }, trailers: [[HOSTILE, HOSTILE]],
      },
    },
  }));
  await page.mouse.move(1, 1);
  await page.getByText(/sampled: 9800 since the last look/).waitFor();
  await page.locator('.approval').filter({ hasText: 'window.hacked' }).first().waitFor();
  const hostile = page.locator('#decisions button').filter({ hasText: 'onerror' }).first();
  await hostile.click();
  await page.locator('#detail-title').getByText('window.hacked').waitFor();
  await page.keyboard.press('Escape');
  // No policy explains such a request (422), and the browser writes that to its console.
  await page.locator('#detail').waitFor({ state: 'hidden' });
  problems.splice(0, problems.length, ...problems.filter(problem => !problem.includes('422')));
  // A command is shown line by line, without scrolling.
  const shell = page.locator('.approval').filter({ hasText: 'RUN sandbox:work' });
  await shell.getByText('network: none').waitFor();
  assert.deepEqual(await shell.locator('ol li').allTextContents(), command.split('\n'));
  assert(await shell.locator('ol').evaluate(list => list.scrollHeight <= list.clientHeight + 1 && list.scrollWidth <= list.clientWidth + 1));
  assert.equal(await shell.locator('dt').filter({ hasText: 'credentials' }).count(), 0);
  // What is not shown whole is approved by two clicks.
  await page.getByText('A part of the request is masked, hashed, too long to be shown').waitFor();
  await page.locator('.approval').filter({ hasText: 'window.hacked' }).getByRole('button', { name: /^Approve once/ }).click();
  await page.getByText('Approve once, although not all of it is shown').waitFor();
  await page.mouse.move(1, 1);
  // It answers within a moment, although lines keep arriving.
  const began = Date.now();
  for (let n = 0; n < 5; n += 1) {
    await page.getByLabel('Filter decisions').fill(`h${n}.test`);
    await page.locator('#decisions tr').first().waitFor();
  }
  await page.getByLabel('Filter decisions').fill('');
  assert(Date.now() - began < 10000, `${Date.now() - began} ms`);
  assert((await page.locator('#decisions tr').count()) <= 200);
  assert.strictEqual(await page.evaluate(() => window.hacked), undefined);
  assert.strictEqual(await page.evaluate(() => document.querySelectorAll('img, iframe').length), 0);

  // A phone, in the dark: nothing is wider than the screen.
  await page.unrouteAll({ behavior: 'ignoreErrors' });
  const phone = await browser.newContext({ viewport: { width: 375, height: 800 }, colorScheme: 'dark' });
  const small = await phone.newPage();
  small.on('pageerror', error => problems.push(`error: ${error.message}`));
  await small.goto(`http://${address}/#${encodeURIComponent(token)}`);
  await small.locator('#executions tr').first().waitFor();
  assert(!small.url().includes(token), small.url());
  const wide = await small.evaluate(() => document.documentElement.scrollWidth - window.innerWidth);
  assert(wide <= 0, `${wide} pixels too wide`);
  await small.waitForTimeout(4500);
  await picture(small, 'page-phone');
  const dark = await small.evaluate(() => getComputedStyle(document.body).backgroundColor);
  assert.strictEqual(dark, 'rgb(16, 21, 27)');

  assert.deepStrictEqual(problems, []);
  await browser.close();
  console.log('done');
}

main().catch(error => {
  console.error(error);
  process.exit(1);
});
