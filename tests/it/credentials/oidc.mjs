// An OpenID provider with clients of several kinds, and a resource that accepts its tokens only.
// Prints its port; then reads the issuer and the PEM file of a client's key, and prints a refresh token.

import { createPublicKey } from 'node:crypto';
import { readFileSync } from 'node:fs';
import { createServer } from 'node:http';
import { createRequire } from 'node:module';
import { createInterface } from 'node:readline';
import { pathToFileURL } from 'node:url';

const require = createRequire(`${process.argv[2]}/package.json`);
const { Provider } = await import(pathToFileURL(require.resolve('oidc-provider')));

let handle = (_, response) => response.writeHead(503).end();
const server = createServer((request, response) => handle(request, response));
server.listen(0, '127.0.0.1', () => console.log(server.address().port));

const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
const next = async () => (await lines.next()).value;
const [issuer, pem] = [await next(), await next()];
const secret = 'gHx7Kq2mZv9LpW4sVt6eRRu8';
const machine = { client_secret: secret, grant_types: ['client_credentials'], redirect_uris: [], response_types: [] };
const key = createPublicKey(readFileSync(pem)).export({ format: 'jwk' });
const provider = new Provider(issuer, {
  clients: [
    { ...machine, client_id: 'basic', token_endpoint_auth_method: 'client_secret_basic' },
    { ...machine, client_id: 'post', token_endpoint_auth_method: 'client_secret_post' },
    {
      ...machine, client_secret: undefined, client_id: 'signed', token_endpoint_auth_method: 'private_key_jwt',
      jwks: { keys: [{ ...key, alg: 'RS256', use: 'sig' }] },
    },
    {
      client_id: 'app', client_secret: secret, grant_types: ['authorization_code', 'refresh_token'],
      redirect_uris: ['https://app.test/cb'], response_types: ['code'],
    },
  ],
  features: { clientCredentials: { enabled: true }, devInteractions: { enabled: false } },
  findAccount: (_, id) => ({ accountId: id, claims: () => ({ sub: id }) }),
  rotateRefreshToken: true,
  scopes: ['openid', 'offline_access', 'api'],
  ttl: { AccessToken: 3600, ClientCredentials: 3600, Grant: 86400, RefreshToken: 86400 },
});
provider.proxy = true;

async function found(token) {
  return (await provider.ClientCredentials.find(token)) ?? (await provider.AccessToken.find(token));
}

const oidc = provider.callback();
handle = async (request, response) => {
  if (request.url !== '/resource' && request.url !== '/revoke') return oidc(request, response);
  const token = await found(request.headers.authorization?.replace(/^Bearer /, '') ?? '');
  if (!token?.isValid) return response.writeHead(401).end();
  if (request.url === '/revoke') await token.destroy();
  return response.end(token.clientId);
};

const grant = new provider.Grant({ accountId: 'me', clientId: 'app' });
grant.addOIDCScope('openid offline_access');
const grantId = await grant.save();
const client = await provider.Client.find('app');
const refresh = new provider.RefreshToken({
  accountId: 'me', client, grantId, scope: 'openid offline_access', gty: 'authorization_code', rotations: 0,
  iiat: Math.floor(Date.now() / 1000),
});
console.log(await refresh.save());
